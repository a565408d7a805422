from .data import load_data as load_data, plan_from_data as plan_from_data
from .examination import refusal as refusal, rule_findings as rule_findings
from .run import describe as describe, lock_of as lock_of
