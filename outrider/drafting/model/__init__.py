"""Draft models: trees of all requests grown in bursts of steps on one device.

    tokens of a request   | context: KV in pages | uncached: committed, KV in tree slots or missing | root | nodes |

A *burst* is a run of *steps*; each step runs the model over the best nodes of its *pool*, of any requests, and adds
their candidates to it. While the device is at one *part* of a burst the host takes in the part before, sends nodes,
follows commits, and lets the burst *go on* with another part; it ends for what cannot be told to a burst under way.
Uncached tokens whose KV is missing, and a root that nobody guessed, are *forced* seeds: the next step runs them first.
A head takes the target's feature of the position before each token. Until that arrives it takes the feature that the
head itself gave at the parent; such KV is not *final* and is computed again once the target's feature is there.

forest, entries     the nodes of all trees in arrays, which of them to run next, and re-rooting
kv, context         where the KV of a request lies, and what of it is missing
batch_manager       requests come and go, rows of the runner, what is to be done for whom
planner             what a burst runs
burst_grower        the loop
publisher           entries of the forest become nodes of the trees that verify is sent
burst               what runners are told and answer
runner              torch_runner on a CPU, cuda_runner on a GPU; cuda_forward, device_memory
round_drafter       the same steps behind a round of verify's, on its device, and what they grow
"""
