from .images import open_image as open_image
from .inputs import ImageInputs as ImageInputs
from .model_config import (
    overrides_for_engine as overrides_for_engine,
    read_config as read_config,
)
from .models import (
    image_token_of as image_token_of,
    model_class as model_class,
    takes_images as takes_images,
    text_config as text_config,
)
from .placeholders import produced_placeholders as produced_placeholders
from .reference import MediaRef as MediaRef
