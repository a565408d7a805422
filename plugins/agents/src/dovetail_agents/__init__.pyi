from .tool_set import OpenTools as OpenTools, ToolSet as ToolSet
