from . import plan_text as plan_text, render as render
