"""What one request computes, moves and sends, counted from a config and a topology.

Pure Python: neither torch nor sglang is imported. Every figure is the value of a formula that is
written once, as text (`formula.py`), so that `glm53 ledger --explain` prints what was computed.

    model.py         names of a config, parameters, bytes of the cache
    topology.py      how ranks share the work; what cannot be is refused in one line
    memory.py        bytes that a rank stores, and that a pass reads
    operators.py     the operators of a dense, a full and a shared layer
    collectives.py   what the ranks send each other, and when
    hardware.py      rates of a GPU, measured and from datasheets (data/*.yaml)
    roofline.py      the bound of a step, MTP's break-even, what fits
    account.py       all of it for one configuration
"""
