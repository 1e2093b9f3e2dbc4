package operation_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/volumemanager/operation"
)

var errBroken = errors.New("broken")

func failing(name string) operation.Operation {
	return operation.Operation{Name: name, Do: func(context.Context) error { return errBroken }}
}

// until runs an operation once its time has come, and tells how long that took.
func until(t *testing.T, e *operation.Executor, key string, o operation.Operation) time.Duration {
	t.Helper()
	start := time.Now()
	for {
		err := e.Run(key, o)
		synctest.Wait()
		later, ok := errors.AsType[*operation.BackoffError](err)
		if !ok {
			if err != nil {
				t.Fatal(err)
			}
			return time.Since(start)
		}
		if !errors.Is(err, errBroken) {
			t.Fatalf("the error does not tell the last one: %v", err)
		}
		time.Sleep(time.Until(later.Until))
	}
}

func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := operation.New(t.Context(), nil)
		want := []time.Duration{0, 500 * time.Millisecond}
		for d := time.Second; d < 122*time.Second; d *= 2 {
			want = append(want, d)
		}
		want = append(want, 122*time.Second, 122*time.Second)
		for i, d := range want {
			if got := until(t, e, "a", failing("volume_mount")); got != d {
				t.Errorf("try %d after %v, want %v", i, got, d)
			}
		}
		if got := until(t, e, "b", failing("volume_mount")); got != 0 {
			t.Errorf("another key waited for %v", got)
		}
		if got := until(t, e, "a", failing("volume_unmount")); got != 0 {
			t.Errorf("another operation waited for %v", got)
		}
		e.Forget("a")
		if got := until(t, e, "a", failing("volume_mount")); got != 0 {
			t.Errorf("what was forgotten waited for %v", got)
		}
	})
}

func TestSuccessResets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := operation.New(t.Context(), nil)
		until(t, e, "a", failing("volume_mount"))
		until(t, e, "a", failing("volume_mount"))
		until(t, e, "a", operation.Operation{Name: "volume_mount", Do: func(context.Context) error { return nil }})
		until(t, e, "a", failing("volume_mount"))
		if got := until(t, e, "a", failing("volume_mount")); got != 500*time.Millisecond {
			t.Errorf("the delay after a success was %v", got)
		}
	})
}

func TestOneOfAKeyAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var order []string
		var mu sync.Mutex
		say := func(s string) {
			mu.Lock()
			defer mu.Unlock()
			order = append(order, s)
		}
		e := operation.New(ctx, func(o operation.Operation, err error, took time.Duration) {
			if took != time.Second || err != nil {
				t.Errorf("took %v, %v", took, err)
			}
			say("done " + o.Name)
		})
		slow := operation.Operation{
			Name: "slow",
			Do: func(context.Context) error {
				time.Sleep(time.Second)
				say("do")
				return nil
			},
			After: func(context.Context, error) {
				if e.Pending("a") {
					t.Error("the key is pending after the operation")
				}
				say("after")
			},
		}
		if err := e.Run("a", slow); err != nil {
			t.Fatal(err)
		}
		if err := e.Run("a", slow); !errors.Is(err, operation.ErrPending) || !e.Pending("a") || e.Pending("b") {
			t.Errorf("a second of the key: %v", err)
		}
		cancel()
		if err := e.Run("b", slow); !errors.Is(err, context.Canceled) {
			t.Errorf("one after the end: %v", err)
		}
		e.Wait()
		if !slices.Equal(order, []string{"do", "after", "done slow"}) {
			t.Errorf("what happened: %v", order)
		}
	})
}

func TestPanicIsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got error
		e := operation.New(t.Context(), func(_ operation.Operation, err error, _ time.Duration) { got = err })
		if err := e.Run("a", operation.Operation{Do: func(context.Context) error { panic("nothing there") }}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got == nil || !strings.Contains(got.Error(), "nothing there") || e.Pending("a") {
			t.Errorf("a panic became %v", got)
		}
	})
}
