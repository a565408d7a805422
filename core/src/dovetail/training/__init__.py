"""What training engines share: how samples are cut, attended to, scored, stored and sent, and what ranks tell each other.

Public for plugins: `ranks` (failing together), `parts` (samples into micro-batches), `scored` (which tokens are scored),
`sequences` and `varlen` (attention over samples that lie end to end), `ulysses` (ranks that share them), `fused_head` with
`head_kernels` and `vocabulary` (the output layer on an accelerator), `stored` (a checkpoint's tensors by name), `state` and
`random_state` (the form of training states, so that each engine goes on from another's), `sending` (weight updates),
`schedule`, `columns`, `lora` (the config section of adapters) and `adapter` (what their tensors are called and start from).
"""
