# Written by `python -m dovetail_sdk interfaces` from the table of names in __init__.py.
# fmt: off
# ruff: noqa: I001, RUF100

from dovetail_sdk.testing.failing_reward import FAILURES as FAILURES
from dovetail_sdk.testing.failing_reward import LIST_FAILURES as LIST_FAILURES
from dovetail_sdk.testing.failing_reward import PROCESS_FAILURES as PROCESS_FAILURES
from dovetail_sdk.testing.failing_reward import release_hung as release_hung
from dovetail_sdk.testing.failing_reward import reward_that_fails as reward_that_fails
from dovetail_sdk.testing.fake_server import FakeServer as FakeServer
from dovetail_sdk.testing.groups import SimulatedGroup as SimulatedGroup
from dovetail_sdk.testing.processes import ProcessRanks as ProcessRanks
from dovetail_sdk.testing.processes import Rank as Rank
from dovetail_sdk.testing.replicas import replica_context as replica_context
from dovetail_sdk.testing.replicas import send_weights as send_weights
from dovetail_sdk.testing.resumed import resumed_state as resumed_state
from dovetail_sdk.testing.scripted_rollout import Script as Script
from dovetail_sdk.testing.scripted_rollout import ScriptedRollout as ScriptedRollout
from dovetail_sdk.testing.table_engine import TableEngine as TableEngine
from dovetail_sdk.testing.temporary import temporary_plugins as temporary_plugins
from dovetail_sdk.testing.tiny import tiny_model as tiny_model
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer as tiny_model_and_tokenizer
from dovetail_sdk.testing.tiny import tiny_tokenizer as tiny_tokenizer
from dovetail_sdk.testing.tiny_vision import square as square
from dovetail_sdk.testing.tiny_vision import tiny_vision_model as tiny_vision_model
from dovetail_sdk.testing.transport_ends import TransportEnd as TransportEnd
from dovetail_sdk.testing.transport_ends import TransportPlace as TransportPlace
