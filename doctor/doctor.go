// Package doctor checks the node, the state directory, the pools, the driver, and in Kubernetes the
// objects of the cluster, and suggests fixes.
//
// It changes nothing except a scratch directory on exports, so it may run beside a serving driver.
// Functions that read facts are separate from functions that judge them, so that table tests cover
// the latter.
package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
)

// Result is the result of a check.
type Result string

// The results. Skipped means that the check could not be made.
const (
	OK      Result = "ok"
	Skipped Result = "skipped"
	Warning Result = "warning"
	Failure Result = "failure"
)

// Check is one check with its result.
type Check struct {
	Name   string `json:"name"`
	Result Result `json:"result"`
	// Seen is what the check found.
	Seen string `json:"seen"`
	// Remedy is the suggested fix; empty if none is needed.
	Remedy string `json:"remedy,omitempty"`
}

// ok returns a check with the result OK. seen is a format for args.
func ok(name, seen string, args ...any) Check {
	return Check{Name: name, Result: OK, Seen: fmt.Sprintf(seen, args...)}
}

func skipped(name, why string) Check { return Check{Name: name, Result: Skipped, Seen: why} }

func warning(name, seen, remedy string) Check { return Check{name, Warning, seen, remedy} }

func failure(name, seen, remedy string) Check { return Check{name, Failure, seen, remedy} }

// advised returns a warning if there is advice, otherwise OK.
func advised(name, seen, advice string) Check {
	if advice != "" {
		return warning(name, seen, advice)
	}
	return ok(name, "%s", seen)
}

// remedy is the suggested fix for an error.
type remedy struct {
	err  error
	text string
}

// judgeError returns a failure if there is an error. The failure's remedy is the first in known that matches the
// error, or fallback. Without an error, judgeError returns OK. seen is a format for args.
func judgeError(name string, err error, known []remedy, fallback, seen string, args ...any) Check {
	if err == nil {
		return ok(name, seen, args...)
	}
	if i := slices.IndexFunc(known, func(r remedy) bool { return errors.Is(err, r.err) }); i >= 0 {
		fallback = known[i].text
	}
	return failure(name, err.Error(), fallback)
}

// Options configures Run.
type Options struct {
	ConfigPath string
	// ConfigOptional is true if the default configuration applies when the file does not exist.
	ConfigOptional bool
	StateDir       string
	Endpoint       string
	// DriverName is the expected name of the driver. If it is empty, any name is accepted.
	DriverName string
	Version    string
	// Kinds are the kinds of volumes that this program supports.
	Kinds backend.Kinds
	// Patience limits each check, so that a disk that hangs does not block the other checks.
	Patience time.Duration
	// Examine runs ExamineExport in a process that is killed when ctx ends.
	Examine func(ctx context.Context, e Export, report func(Check)) error
	Pod     Pod
	// Begin is called with the subject of the checks that begin; nil: it is not called.
	Begin func(subject string)
}

func (o Options) begin(subject string) {
	if o.Begin != nil {
		o.Begin(subject)
	}
}

// Pod describes the pod of this process, from its environment. It is empty outside Kubernetes.
type Pod struct {
	InCluster                  bool
	Node, Namespace, Name, UID string
}

// Run makes all checks of a node or a controller, for the driver's configuration.
func Run(ctx context.Context, o Options) []Check {
	config, err := driver.LoadConfig(o.ConfigPath, o.ConfigOptional, o.StateDir, o.Kinds)
	var checks []Check
	if !config.Forwarding.Controller() {
		o.begin("the node")
		checks = checkWithin(o.Patience, "node", func() []Check { return nodeChecks(ctx, o.Kinds.Needed(config.Pools)) })
	}
	if err != nil {
		checks = append(checks, failure("configuration", err.Error(), "correct the file, or name another with --config"))
	}
	o.begin("the driver")
	serving := readDriver(ctx, o, config)
	o.begin("the state directory")
	checks = append(checks, checkWithin(o.Patience, stateDirectory, func() []Check { return []Check{stateCheck(o.StateDir)} })...)
	o.begin("the pools")
	configs := pool.Arrange(config.Pools)
	checks = append(checks, checkWithin(o.Patience, "pools", func() []Check { return nestingChecks(configs, o.StateDir) })...)
	opened := openPools(ctx, configs, o)
	defer opened.close()
	for _, p := range configs {
		o.begin("pool " + p.Name)
		switch {
		case p.Shared():
			checks = append(checks, ExportChecks(ctx, o, Export{Config: p, StateDir: o.StateDir, Node: o.Pod.Node, Serving: serving.ready})...)
		case p.Section != nil:
			checks = append(checks, checkWithin(o.Patience, "pool "+p.Name, func() []Check { return storageChecks(ctx, o.Kinds.Forms(), p, o.StateDir, serving.ready) })...)
		default:
			checks = append(checks, checkWithin(o.Patience, "pool "+p.Name, func() []Check { return poolChecks(p, o.StateDir, opened[p.Name], serving.ready) })...)
		}
		if err, queried := serving.pools[p.Name]; queried && serving.ready {
			checks = append(checks, judgeServed("pool "+p.Name+", served", err))
		}
	}
	checks = append(checks, judgeDriver(serving, o))
	o.begin("the cluster")
	driverName := cmp.Or(o.DriverName, serving.name, driver.DefaultName)
	checks = append(checks, forwardingChecks(config.Forwarding, o, driverName, serving)...)
	return append(checks, kubernetesChecks(ctx, o, driverName, config)...)
}

// exportPatience multiplies Options.Patience for an export, because the doctor mounts it several times.
const exportPatience = 3

// ExportChecks checks an export. If a check hangs, the result contains the checks before it and a failure.
func ExportChecks(ctx context.Context, o Options, e Export) []Check {
	o.begin(e.name())
	var checks []Check
	ctx, cancel := context.WithTimeout(ctx, exportPatience*o.Patience)
	defer cancel()
	err := o.Examine(ctx, e, func(c Check) { checks = append(checks, c) })
	if err == nil {
		return checks
	}
	when := "at the beginning"
	if len(checks) > 0 {
		when = "after the check \"" + checks[len(checks)-1].Name + "\""
	}
	return append(checks, failure(e.name(), fmt.Sprintf("%s: %v", when, err),
		serverLog+"; remove directories "+scratchPrefix+"* from the export"))
}

// checkWithin returns the results of check, or a failure if check takes longer than atMost.
func checkWithin(atMost time.Duration, name string, check func() []Check) []Check {
	checks, err := Within(atMost, func() ([]Check, error) { return check(), nil })
	if err != nil {
		return []Check{hangFailure(name, err)}
	}
	return checks
}

// hangFailure returns a failure for a check that did not end in time.
func hangFailure(name string, err error) Check {
	return failure(name, err.Error(), "fix the disk, or unmount it")
}

// errTimeout is returned by Within if read takes too long.
var errTimeout = errors.New("no answer")

// Within calls read, and returns an error if read takes longer than atMost. The goroutine of read then
// remains, because a read of a disk that hangs cannot be aborted.
func Within[T any](atMost time.Duration, read func() (T, error)) (result T, err error) {
	type answer struct {
		result T
		err    error
	}
	done := make(chan answer, 1)
	go func() {
		result, err := read()
		done <- answer{result, err}
	}()
	select {
	case a := <-done:
		return a.result, a.err
	case <-time.After(atMost):
		return result, fmt.Errorf("%w within %v: check whether a disk hangs (dmesg)", errTimeout, atMost)
	}
}

// Failed reports whether a check failed.
func Failed(checks []Check) bool {
	return slices.ContainsFunc(checks, func(c Check) bool { return c.Result == Failure })
}
