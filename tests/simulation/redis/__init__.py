"""A model of Redis: one server as its clients see it, with a clock and a network given from outside.

It knows the commands that the package uses, and some that tests use; a real Lua 5.1 runs the scripts. Unknown commands
end the simulation with `UnknownCommand`: a guessed answer would prove nothing.

Known differences from a real server (`tests/simulation/test_redis_model.py` compares them):

- SCAN, HSCAN and KEYS show the same names in another order; cursors are other numbers.
- Expired keys are deleted when somebody looks at them, or by `sweep`; a real server does that at any time (DBSIZE).
- `MAXLEN ~` trims nodes of 100 entries; nodes of a real server may be smaller if the entries are large.
- cjson is stricter about numbers (`01`, `0x1`), and words its errors differently; a script that raises a table (before
  version 7), or a table without `err` (since then), gets another answer. `bit`, `struct` and `cmsgpack` are missing.
- On a replica of a real server, a script sees expired keys until the primary deletes them.
- Busy and loading servers, passwords, and WAIT with replicas follow the documentation, and are not compared.
"""

from tests.simulation.redis.cluster import ClusterMap, slot_of
from tests.simulation.redis.dataset import Change, Dataset
from tests.simulation.redis.replies import UnknownCommand
from tests.simulation.redis.server import RedisModel
from tests.simulation.redis.session import Session

__all__ = ["Change", "ClusterMap", "Dataset", "RedisModel", "Session", "UnknownCommand", "slot_of"]
