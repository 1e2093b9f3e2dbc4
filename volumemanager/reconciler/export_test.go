package reconciler

import "context"

// Pass exports pass for the benchmark.
func (r *Reconciler) Pass(ctx context.Context) { r.pass(ctx) }

// Populate exports populate for the benchmark.
func (r *Reconciler) Populate() { r.populate() }

// Sync exports sync for the benchmark.
func (r *Reconciler) Sync(ctx context.Context) { r.sync(ctx) }
