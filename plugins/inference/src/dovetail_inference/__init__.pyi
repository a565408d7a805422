from .conversation import open_model as open_model
