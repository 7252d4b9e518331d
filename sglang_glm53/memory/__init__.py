"""The KV cache: layout arithmetic (page.py, pure Python) and the pool (pool.py)."""
