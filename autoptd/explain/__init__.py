"""Text about plans: summary, comparison, memory formulas, timeline. `cli`, `answers` and `plans.model` import it. Only
`memory` needs the traced model, and may import `compile` and all below it. The other modules work on `plans.data`, and
import nothing of `search`, `codegen`, `runtime` or `compile`.
"""
