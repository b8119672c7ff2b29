"""The training program of a rank: `trainer` holds its stages, buffers and optimizer; `executor` runs its action list.
The layers above (`api`, `checkpoint`, `verification`, …) import from its modules. It imports `layout`, `ops`,
`schedule` and `plans`, never `passes`, `explain`, `search` or `codegen`."""
