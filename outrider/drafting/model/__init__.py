"""Draft models: trees of all requests grown in bursts of steps on one device.

    tokens of a request   | context: KV in pages | uncached: committed, KV in tree slots or missing | root | nodes |

A *burst* is a run of *steps*. Each step runs the model over the best nodes of the burst's *pool*, which may be from any
requests, and adds their candidates to the pool. While the device runs one *part* of a burst, the host takes in the part
before, sends nodes, follows commits, and lets the burst *go on* with another part. The burst ends when something comes
that a running burst cannot be told. Uncached tokens whose KV is missing, and a root that nobody guessed, are *forced*
seeds: the next step runs them first. A head takes the target's feature of the position before each token. Until that
arrives, it takes the feature that it computed itself at the parent. Such KV is not *final*, and is computed again once
the target's feature is there.

forest, entries     the nodes of all trees in arrays, which of them to run next, and re-rooting
kv, context         where the KV of a request lies, and which KV is missing
batch_manager       requests that come and go, their rows of the runner, and the work to be done for each
planner             what a burst runs
burst_grower        the loop
publisher           turns entries of the forest into nodes of the trees that are sent to verify
burst               the input and output of runners
runner              torch_runner on a CPU, cuda_runner on a GPU; cuda_forward, device_memory
round_drafter       the same steps behind a round of verify's, on its device
"""
