// Package measure contains what the benchmarks share: a testbed with processes, concurrent calls,
// and percentiles of their durations.
package measure

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/trivet-csi/trivet/internal/mountns"
)

// Main runs a benchmark. A benchmark also starts its own executable for other roles: if the first
// argument is a key of roles, Main calls that role instead of run.
func Main(name string, roles map[string]func(ctx context.Context, args []string) error, run func(ctx context.Context, args []string) error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	args := os.Args[1:]
	if len(args) > 0 && roles[args[0]] != nil {
		run, args = roles[args[0]], args[1:]
	}
	err := run(ctx, args)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1)
	}
}

// Isolate moves the benchmark to a new mount namespace. Call it before all other code.
func Isolate() error {
	if os.Getuid() != 0 {
		return errors.New("the benchmark mounts filesystems and attaches devices: run it as root")
	}
	return mountns.Enter()
}

// failure is the value with which Must panics.
type failure struct{ err error }

// Must ends the measurement with a panic if err is not nil. Only the goroutine that runs the
// measurement may call it. Other goroutines must return their errors.
func Must(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// Get returns v, or ends the measurement like Must if err is not nil.
func Get[T any](v T, err error) T {
	Must(err)
	return v
}

// try runs a measurement and returns the error that ended it.
func try(run func()) (err error) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		failed, ok := p.(failure)
		if !ok {
			panic(p)
		}
		err = failed.err
	}()
	run()
	return nil
}
