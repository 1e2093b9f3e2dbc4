package operation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var errBroken = errors.New("broken")

// returning returns an operation whose Do returns err at once.
func returning(name string, err error) Operation {
	return Operation{Name: name, Do: func(context.Context) error { return err }}
}

// failing returns an operation that fails with errBroken.
func failing(name string) Operation { return returning(name, errBroken) }

// runAfterBackoff runs an operation when its back-off ends, and returns the duration of the back-off.
func runAfterBackoff(t *testing.T, e *Executor, key string, o Operation) time.Duration {
	t.Helper()
	start := time.Now()
	for {
		err := e.Run(key, o)
		synctest.Wait()
		later, ok := errors.AsType[*BackoffError](err)
		if !ok {
			if err != nil {
				t.Fatal(err)
			}
			return time.Since(start)
		}
		if !errors.Is(err, errBroken) {
			t.Fatalf("got error %v, want one that wraps the error of the last attempt", err)
		}
		time.Sleep(time.Until(later.Until))
	}
}

// TestBackoff: the delay doubles up to its maximum. Each key and each operation has its own delay.
func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := New(t.Context(), nil)
		wantDelay := func(what, key string, o Operation, want time.Duration) {
			t.Helper()
			if got := runAfterBackoff(t, e, key, o); got != want {
				t.Errorf("%s: got a delay of %v, want %v", what, got, want)
			}
		}
		want := []time.Duration{0, 500 * time.Millisecond}
		for d := time.Second; d < 122*time.Second; d *= 2 {
			want = append(want, d)
		}
		for i, d := range append(want, 122*time.Second, 122*time.Second) {
			wantDelay(fmt.Sprint("attempt ", i), "a", failing("volume_mount"), d)
		}
		wantDelay("another key", "b", failing("volume_mount"), 0)
		wantDelay("another operation", "a", failing("volume_unmount"), 0)
		e.Forget("a")
		wantDelay("after Forget", "a", failing("volume_mount"), 0)
		wantDelay("success after a failure", "a", returning("volume_mount", nil), 500*time.Millisecond)
		wantDelay("failure after a success", "a", failing("volume_mount"), 0)
		wantDelay("second failure after a success", "a", failing("volume_mount"), 500*time.Millisecond)
	})
}

// TestIdleKeysRemoved: the executor holds no state of operations that succeeded, and none of operations
// that failed and were not retried for a long time.
func TestIdleKeysRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := New(t.Context(), nil)
		run := func(key string, result error) {
			if err := e.Run(key, returning("", result)); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		for i := range 100 {
			run(fmt.Sprint("valid ", i), nil)
		}
		if n := len(e.pending) + len(e.failures); n != 0 {
			t.Errorf("after operations that succeeded: got %d keys, want 0", n)
		}
		for i := range 100 {
			run(fmt.Sprint("bad ", i), errBroken)
		}
		time.Sleep(2*maxDelay + time.Second)
		run("another", errBroken)
		if n := len(e.pending) + len(e.failures); n != 1 {
			t.Errorf("long after operations that failed: got %d keys, want only the key of the last one", n)
		}
	})
}

// TestOneOperationPerKey: a key has one operation at a time, and none starts after the context has
// ended.
func TestOneOperationPerKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var order []string
		var mu sync.Mutex
		log := func(s string) {
			mu.Lock()
			defer mu.Unlock()
			order = append(order, s)
		}
		e := New(ctx, func(o Operation, err error, took time.Duration) {
			if took != time.Second || err != nil {
				t.Errorf("got duration %v, error %v; want %v, nil", took, err, time.Second)
			}
			log("done " + o.Name)
		})
		slow := Operation{
			Name: "slow",
			Do: func(context.Context) error {
				time.Sleep(time.Second)
				log("do")
				return nil
			},
			After: func(context.Context, error) {
				if e.Pending("a") {
					t.Error("After was called while the key was pending")
				}
				log("after")
			},
		}
		if err := e.Run("a", slow); err != nil {
			t.Fatal(err)
		}
		if err := e.Run("a", slow); !errors.Is(err, ErrPending) || !e.Pending("a") || e.Pending("b") {
			t.Errorf("a second operation of the key: got %v, want ErrPending, and only key a pending", err)
		}
		cancel()
		if err := e.Run("b", slow); !errors.Is(err, context.Canceled) {
			t.Errorf("an operation after the context has ended: got %v, want %v", err, context.Canceled)
		}
		e.Wait()
		if !slices.Equal(order, []string{"do", "after", "done slow"}) {
			t.Errorf("order of the calls: got %v, want do, after, done slow", order)
		}
	})
}

// TestPanicIsAnError: after a panic, the operation has an error, and its key is free.
func TestPanicIsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got error
		e := New(t.Context(), func(_ Operation, err error, _ time.Duration) { got = err })
		if err := e.Run("a", Operation{Do: func(context.Context) error { panic("nil map") }}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got == nil || !strings.Contains(got.Error(), "nil map") || e.Pending("a") {
			t.Errorf("got error %v, want one with the panic's text, and the key not pending", got)
		}
	})
}
