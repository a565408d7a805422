from .encoding import Marked as Marked, TextEncoder as TextEncoder
