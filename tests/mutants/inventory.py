"""Every guard that a promise rests on, by where it stands."""

from tests.mutants.guards.admission import ADMISSION
from tests.mutants.guards.attempts import ATTEMPTS
from tests.mutants.guards.clients import CLIENTS
from tests.mutants.guards.decode import DECODE
from tests.mutants.guards.emitting import EMITTING
from tests.mutants.guards.ending import ENDING
from tests.mutants.guards.groups import GROUPS
from tests.mutants.guards.growing import GROWING
from tests.mutants.guards.handing_over import HANDING_OVER
from tests.mutants.guards.health import HEALTH
from tests.mutants.guards.holding import HOLDING
from tests.mutants.guards.losing import LOSING
from tests.mutants.guards.prefill import PREFILL
from tests.mutants.guards.prefix_cache import PREFIX_CACHE
from tests.mutants.guards.recovering import RECOVERING
from tests.mutants.guards.restarting import RESTARTING
from tests.mutants.guards.web import WEB
from tests.mutants.guards.wires import WIRES
from tests.mutants.mutant import Mutant

ALL: tuple[Mutant, ...] = (
    *ADMISSION,
    *GROUPS,
    *ATTEMPTS,
    *EMITTING,
    *HANDING_OVER,
    *RECOVERING,
    *LOSING,
    *PREFILL,
    *PREFIX_CACHE,
    *DECODE,
    *GROWING,
    *HOLDING,
    *WIRES,
    *HEALTH,
    *WEB,
    *CLIENTS,
    *RESTARTING,
    *ENDING,
)
