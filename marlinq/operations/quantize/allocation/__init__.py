"""Allocation: the best model of a given size, by choosing the scheme of each module.

    units         config, headers, recipe, loader -> Units: what is decided together, and what each may become
    sensitivity   Units, text                     -> nats a token that each option costs, alone in the model
    knapsack      bytes and costs, budget         -> the exact choice
    allocate      recipe with a target            -> Allocation, which the recipe keeps
    sizes         recipe with an allocation       -> its bits and bytes, or why it does not suit the model

``--target-bits`` and ``--target-size`` say how much the choice may take. It is made before anything else is
planned, so that every later stage sees a recipe with rules per module and nothing else: ``--plan`` reports
it, the manifest holds it, and a run of the manifest's recipe measures nothing and gives the same tensors.

* **Units** follow the loader that ``--for`` names: what its entry in ``servers.toml`` fuses gets one scheme
  (q, k and v; gate and up), and so do all experts of a layer. Options are the candidates of
  :mod:`~marlinq.operations.quantize.candidates` that shapes, format, method and loader take. Modules that an
  override is about are not in any unit; nor is the output head, which ``--quantize-head`` decides.
* **Bytes** are those of the planned tensors: codes, scales, zero points, shapes. Bits are counted over the
  linears of the decoder's blocks: the units, and what overrides decide. A size is of all tensors of the
  output, as ``--plan`` shows it; headers and side files come on top.
* **Sensitivity** is the exact Fisher's quadratic form of each option's own rounding error
  (:mod:`~marlinq.operations.quantize.allocation.sensitivity`): one forward and one backward pass of the
  original, then for each block one more of each and a solve for every option, in memory for one block.
  Swapping one unit at a time measures the same directly, at half a forward pass for every option of every
  unit; ``lab/quality/sensitivity_check.py`` compares the two.
* **Choice** is dynamic programming over bytes, so whatever uniform scheme fits the target is never estimated
  to be better than what is chosen.
"""
