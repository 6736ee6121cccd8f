"""What Outrider's services share. Importing this package imports neither torch nor grpc."""

import os

__version__ = "0.1.0"

# grpc's C core writes to stderr by itself, in its own form, unless told before grpc's first import, which comes after
# this one; what matters reaches us as statuses and exceptions.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# No service forks and goes on in the child: what runs there is another program. gRPC's handlers for forks, which uvloop
# runs when it starts one, abort the child now and then while calls are under way.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
