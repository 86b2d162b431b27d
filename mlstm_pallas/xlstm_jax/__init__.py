"""The documented systems of xlstm_jax as adapters: names, signatures, defaults and shapes of its public API documents, a module a system.

max_triton_fwbw_v3noslice, max_triton_fwbw_v5xlchunksize and triton_stablef reshape their arguments and call the stages of mlstm_pallas;
no kernel lives here. The entries (``mlstm_chunkwise_*``) and ``_mlstm_chunkwise_fwbw_generator`` have exact gradients. The stage functions
and ``_mlstm_chunkwise_bw`` do what their documents say: the denominator of h is a constant to them. New code calls
``mlstm_pallas.mlstm_chunkwise``.
"""
