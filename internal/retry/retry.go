// Package retry repeats a step that is expected to succeed within milliseconds or seconds, for
// example to take a lock from a process that is ending. For anything longer, a call fails and the
// orchestrator retries it.
package retry

import (
	"context"
	"time"
)

// For repeats step until step returns again=false or patience has passed, and returns the last error of
// step. If ctx ends earlier, For returns the error of ctx.
func For(ctx context.Context, patience time.Duration, step func() (again bool, err error)) error {
	deadline := time.Now().Add(patience)
	for wait := 100 * time.Microsecond; ; wait = min(2*wait, 20*time.Millisecond) {
		again, err := step()
		if !again || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}
