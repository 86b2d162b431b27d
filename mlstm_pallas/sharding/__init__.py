"""Where a pass or a step runs: on every device for its batch entries and heads.

A Triton kernel is a custom call, which XLA cannot partition: by default it gathers all shards on
every device. But batch entries and heads are independent, so a function of them runs unchanged on
shards of these two axes (on_shards.py, work.py). How it learns its shards depends on the axes of
the mesh:

* Auto axes (partitioned.py): XLA propagates shardings long after tracing. JAX (0.10.2 to 0.12) has
  ``custom_partitioning`` for this. It takes a Shardy rule (the batch and head axes are free, all
  others need replication) and a function, which is traced again for the shapes of one shard. On one
  device it lowers to the function itself. It has no batching rule, so ``custom_vmap`` around it
  turns a mapped axis into one more free axis. Its callback cannot be exported and needs devices
  when it is lowered. libtpu does not have it (tpu.py).
* Explicit axes (axes.py): shardings are in the types of the arrays and are read when the call is
  traced. ``jax.shard_map`` over those axes lowers without devices (AbstractMesh), and exports.
* Manual axes, inside the user's shard_map: the arrays are the shard.

Arrays cross the boundary of the sharded region in their layout: ``arrays.heads_axes`` says which
axis is NH. Shardings of other axes (sequence, head dimensions) are undone first: by XLA on auto
axes, by ``jax.sharding.reshard`` on explicit ones.

Plain jnp may run for a few heads at a time (work.py). marks.py refuses derivatives, and kernels on
other platforms than CUDA.

It imports planning/ and below.
"""
