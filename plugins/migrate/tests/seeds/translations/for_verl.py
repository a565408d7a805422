"""A dataset class, a reward function and a tool as jobs of verl's bring them."""

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.dataset import RLHFDataset
from verl.utils.reward_score import math_dapo


class Rows(RLHFDataset):
    pass


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return math_dapo.compute_score(solution_str, ground_truth)


class Doubling(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=str(2 * int(parameters["number"]))), 0.0, {}
