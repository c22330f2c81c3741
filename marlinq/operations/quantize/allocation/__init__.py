"""Allocation: chooses the scheme of each module so that a model of a given size is best.

    units         config, headers, recipe, loader -> Units: modules that share a scheme, and their options
    sensitivity   Units, text                     -> mean KL (nats a token) of each option, alone in the model
    knapsack      bytes and costs, budget         -> the exact choice
    allocate      recipe with a target            -> Allocation, which the recipe keeps
    sizes         recipe with an allocation       -> its bits and bytes, or why it does not suit the model

``--target-bits`` or ``--target-size`` is the budget. The choice is made before the rest of the plan, so that
later stages see a recipe with one rule per module: ``--plan`` reports it, the manifest holds it, and a run of
the manifest's recipe measures nothing and gives the same tensors.

* **Units** follow the loader that ``--for`` names: linears that its entry in ``servers.toml`` fuses (q, k and
  v; gate and up) share a scheme, and so do all experts of a layer. Options are the candidates of
  :mod:`~marlinq.operations.quantize.candidates` that shapes, format, method and loader take. Modules with an
  override belong to no unit, nor does the output head, which ``--quantize-head`` decides.
* **Bytes** are those of the planned tensors: codes, scales, zero points, shapes. ``--target-bits`` counts the
  linears of the decoder's blocks, with overrides. ``--target-size`` counts all tensors of the output, as
  ``--plan`` shows them, without headers and side files.
* **Sensitivity** is the quadratic form of each option's own rounding error with the exact Fisher information
  (:mod:`~marlinq.operations.quantize.allocation.sensitivity`). It takes one forward and one backward pass of
  the original, then one of each and a solve for every option per block, with one block in memory. Swapping
  single units and running the model measures the same, at half a forward pass for every option of every unit;
  ``lab/quality/sensitivity_check.py`` compares the two.
* **Choice** is dynamic programming over bytes, so no uniform scheme that fits the target has a lower estimate
  than the choice.
"""
