package reconciler

import "context"

// Pass, Populate and Sync are the parts of the loop for the benchmark.
func (r *Reconciler) Pass(ctx context.Context) { r.pass(ctx) }

// Populate computes the desired state.
func (r *Reconciler) Populate() { r.populate() }

// Sync compares the actual state with the disk.
func (r *Reconciler) Sync(ctx context.Context) { r.sync(ctx) }
