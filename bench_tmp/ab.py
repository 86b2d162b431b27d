"""ab.py NAME=TREE ...: times calls of two checkouts in turns, one process each."""
import subprocess, sys, os, statistics, json
if sys.argv[1] == "worker":
    import time, jax, jax.numpy as jnp
    from concurrent.futures import ThreadPoolExecutor
    from mlstm_pallas import mlstm_chunkwise
    SHAPES = {"7b-8k": (8, 8, 8192, 256, 512), "tfla-8k": (8, 16, 8192, 128, 256), "b1-8k": (1, 8, 8192, 256, 512),
              "small-8k": (8, 32, 8192, 64, 128), "few-2k": (1, 4, 2048, 256, 512), "7b-8191": (8, 8, 8191, 256, 512)}
    only = os.environ.get("ONLY", "").split(",")
    calls = {}
    def inputs(shape):
        B, NH, S, K, V = shape
        ks = jax.random.split(jax.random.key(0), 6)
        q, k = (jax.random.normal(x, (B, NH, S, K), jnp.bfloat16) for x in ks[:2])
        v, dh = (jax.random.normal(x, (B, NH, S, V), jnp.bfloat16) for x in ks[2:4])
        return q, k, v, jax.random.normal(ks[4], (B, NH, S)), 4 + jax.random.normal(ks[5], (B, NH, S)), dh
    def build(item):
        name, backend, direction = item
        x = inputs(SHAPES[name])
        def fn(q, k, v, i, f, dh):
            g = lambda *y: mlstm_chunkwise(*y, backend=backend)
            if direction == "fwd": return g(q, k, v, i, f)
            h, back = jax.vjp(g, q, k, v, i, f)
            return h, *back(dh)
        c = jax.jit(fn).lower(*x).compile()
        calls["/".join(item)] = c, SHAPES[name]
        if os.environ.get("ONLY"):
            import re, collections
            text = c.as_text()
            print("/".join(item), len(text), dict(collections.Counter(re.findall(r"(custom-call|fusion|copy|call|while|command_buffer|conditional)\(", text))), file=sys.stderr, flush=True)
    items = [(n, b, d) for n in SHAPES for b in ("mosaic_gpu", "triton") for d in ("fwd", "fwbw") if only == [""] or n in only]
    with ThreadPoolExecutor(8) as pool: list(pool.map(build, items))
    print(json.dumps(["/".join(i) for i in items] + [jax.devices()[0].device_kind, jax.__version__]), flush=True)
    last = None
    for line in sys.stdin:
        key = line.strip()
        call, shape = calls[key]
        if last is None or last[0] != shape: last = None; last = shape, inputs(shape)
        x = last[1]
        r = call(*x); jax.block_until_ready(r)
        t = time.perf_counter(); n = 0
        r = call(*x); jax.block_until_ready(r); one = time.perf_counter() - t
        n = max(5, min(200, int(0.06 / one)))
        t = time.perf_counter()
        for _ in range(n): r = call(*x)
        jax.block_until_ready(r)
        ms = (time.perf_counter() - t) / n * 1e3
        del r
        print(ms, flush=True)
else:
    workers = {}
    for arg in sys.argv[1:]:
        name, tree = arg.split("=")
        env = os.environ | {"PYTHONPATH": os.path.abspath(tree), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        workers[name] = subprocess.Popen([sys.executable, __file__, "worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    heads = {n: json.loads(w.stdout.readline()) for n, w in workers.items()}
    *keys, kind, version = next(iter(heads.values()))
    print(kind, version, flush=True)
    a, b, *_ = workers
    for key in keys:
        t = {n: [] for n in workers}
        for r in range(9):
            for n, w in (list(workers.items()) if r % 2 else list(workers.items())[::-1]):
                w.stdin.write(key + "\n"); w.stdin.flush(); t[n].append(float(w.stdout.readline()))
        ratio = statistics.median(y / x for x, y in zip(t[a], t[b]))
        print(f"{key:28}", *(f"{n} {statistics.median(t[n]):8.4f}" for n in workers), f"ratio {ratio:.4f}", flush=True)
    for w in workers.values(): w.stdin.close()
