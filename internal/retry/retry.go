// Package retry repeats a step that may succeed in a moment: a lock that a dying
// process still holds, a device that its last user is about to close.
//
// It is for moments. What takes longer is answered with an error, and tried again
// by the caller of the driver.
package retry

import (
	"context"
	"time"
)

// For repeats step while it asks to be tried again, and returns its last error
// once it does not, or patience is over. It ends early, with its error, when ctx
// does.
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
