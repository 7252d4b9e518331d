"""What a forward pass really runs, beside what the ledger counts.

    recorder.py      in each process of SGLang: every collective and every matrix product of a pass
    hooks.py         entry point of that process; there only while `glm53 trace` runs
    run.py           starts SGLang's Engine with a topology, asks it, and reads the recordings
    child.py         the process that holds the Engine
    compare.py       recordings beside the ledger's rows

Nothing is wrapped: the recorder uses torch's dispatch mode and its module hooks.
"""
