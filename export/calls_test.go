package export

import (
	"testing"
	"time"
)

// TestHangs: a slow call is not aborted while its mounts answer.
func TestHangs(t *testing.T) {
	t.Run("slow", func(t *testing.T) {
		returned, asked := make(chan struct{}), 0
		if hangs(returned, time.Millisecond, func() bool {
			if asked++; asked == 3 {
				close(returned)
			}
			return true
		}) {
			t.Error("the call was aborted")
		}
		if asked < 3 {
			t.Errorf("asked %d times", asked)
		}
	})
	t.Run("hangs", func(t *testing.T) {
		asked := 0
		if !hangs(make(chan struct{}), time.Millisecond, func() bool { asked++; return asked < 3 }) {
			t.Error("the call was not aborted")
		}
	})
	t.Run("returned", func(t *testing.T) {
		returned := make(chan struct{})
		close(returned)
		if hangs(returned, time.Hour, func() bool { t.Error("the function was called"); return false }) {
			t.Error("the call was aborted")
		}
	})
}
