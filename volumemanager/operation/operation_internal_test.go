package operation

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// TestIdleKeysGo: neither what succeeds nor what failed and was never tried again leaves
// anything behind.
func TestIdleKeysGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := New(t.Context(), nil)
		run := func(key string, err error) {
			if e := e.Run(key, Operation{Do: func(context.Context) error { return err }}); e != nil {
				t.Fatal(e)
			}
			synctest.Wait()
		}
		for i := range 100 {
			run(fmt.Sprint("valid ", i), nil)
		}
		if n := len(e.keys); n != 0 {
			t.Errorf("%d keys of what succeeded", n)
		}
		for i := range 100 {
			run(fmt.Sprint("bad ", i), errors.New("broken"))
		}
		time.Sleep(2*maxDelay + time.Second)
		run("another", errors.New("broken"))
		if n := len(e.keys); n != 1 {
			t.Errorf("%d keys long after", n)
		}
	})
}
