package export

import (
	"testing"
	"time"
)

// TestHangs: a call hangs if it does not return and its mounts do not answer.
func TestHangs(t *testing.T) {
	t.Run("mounts answer until the call returns", func(t *testing.T) {
		returned, tests := make(chan struct{}), 0
		if hangs(returned, time.Millisecond, func() bool {
			if tests++; tests == 3 {
				close(returned)
			}
			return true
		}) {
			t.Error("hangs: got true, want false")
		}
		if tests < 3 {
			t.Errorf("the mounts were tested %d times, want 3", tests)
		}
	})
	t.Run("mounts stop answering", func(t *testing.T) {
		tests := 0
		if !hangs(make(chan struct{}), time.Millisecond, func() bool { tests++; return tests < 3 }) {
			t.Error("hangs: got false, want true")
		}
	})
	t.Run("call has returned", func(t *testing.T) {
		returned := make(chan struct{})
		close(returned)
		if hangs(returned, time.Hour, func() bool { t.Error("the mounts were tested"); return false }) {
			t.Error("hangs: got true, want false")
		}
	})
}
