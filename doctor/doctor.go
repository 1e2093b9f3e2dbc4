// Package doctor tells what a node can and cannot do, and what to install or
// enable: the node itself, the state directory, the pools, the driver, and in
// Kubernetes what the cluster was told of it.
//
// It looks and changes nothing: it runs beside a driver that serves. What is read
// is kept apart from what is made of it, so that the judgement is a table's work
// to test.
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

// Result is how a check came out.
type Result string

// The results, from good to bad; what could not be looked at is Skipped.
const (
	OK      Result = "ok"
	Skipped Result = "skipped"
	Warning Result = "warning"
	Failure Result = "failure"
)

// Check is one thing that was looked at.
type Check struct {
	Name   string `json:"name"`
	Result Result `json:"result"`
	Seen   string `json:"seen"`
	// Remedy is what to do, if something is to be done.
	Remedy string `json:"remedy,omitempty"`
}

func ok(name, seen string, args ...any) Check {
	return Check{Name: name, Result: OK, Seen: fmt.Sprintf(seen, args...)}
}

func skipped(name, why string) Check { return Check{Name: name, Result: Skipped, Seen: why} }

func warning(name, seen, remedy string) Check { return Check{name, Warning, seen, remedy} }

func failure(name, seen, remedy string) Check { return Check{name, Failure, seen, remedy} }

// Options say what to look at.
type Options struct {
	ConfigPath string
	// ConfigOptional: without the file the default configuration is meant.
	ConfigOptional bool
	StateDir       string
	Endpoint       string
	// DriverName is what the driver should be called; empty: as it says itself.
	DriverName string
	Version    string
	// Kinds are the kinds of volumes of this version.
	Kinds backend.Kinds
	// Patience is how long each look may take: a disk that hangs is what a doctor is
	// called for, and must not keep the rest from being told.
	Patience time.Duration
	// Examine runs ExamineExport where it can be left behind: in a process that is
	// killed when ctx ends.
	Examine func(ctx context.Context, e Export, tell func(Check)) error
	Pod     Pod
}

// Pod is the pod that this process runs in, as its environment says; all is empty
// outside Kubernetes.
type Pod struct {
	InCluster                  bool
	Node, Namespace, Name, UID string
}

// Run looks at everything that concerns the driver whose configuration it is.
func Run(ctx context.Context, o Options) []Check {
	config, err := driver.LoadConfig(o.ConfigPath, o.ConfigOptional, o.StateDir, o.Kinds)
	var checks []Check
	if !config.Forwarding.Controller() {
		checks = within(o.Patience, "node", func() []Check { return nodeChecks(ctx, o.Kinds) })
	}
	if err != nil {
		checks = append(checks, failure("configuration", err.Error(), "correct the file, or name another with --config"))
	}
	serving := lookAtDriver(ctx, o, config)
	checks = append(checks, within(o.Patience, stateDirectory, func() []Check { return []Check{stateCheck(o.StateDir)} })...)
	configs := pool.Arrange(config.Pools)
	checks = append(checks, within(o.Patience, "pools", func() []Check { return nestingChecks(configs, o.StateDir) })...)
	looked := lookAtPools(ctx, configs, o)
	defer looked.close()
	for _, p := range configs {
		switch {
		case p.Shared():
			checks = append(checks, ExportChecks(ctx, o, Export{Config: p, StateDir: o.StateDir, Node: o.Pod.Node, Serving: serving.ready})...)
		case p.Section != nil:
			checks = append(checks, within(o.Patience, "pool "+p.Name, func() []Check { return storageChecks(ctx, o.Kinds.Forms(), p, o.StateDir, serving.ready) })...)
		default:
			checks = append(checks, within(o.Patience, "pool "+p.Name, func() []Check { return poolChecks(p, o.StateDir, looked[p.Name], serving.ready) })...)
		}
		if err, asked := serving.pools[p.Name]; asked && serving.ready {
			checks = append(checks, judgeServed("pool "+p.Name+", served", err))
		}
	}
	checks = append(checks, judgeDriver(serving, o))
	driverName := cmp.Or(o.DriverName, serving.name, driver.DefaultName)
	checks = append(checks, forwardingChecks(config.Forwarding, o, driverName, serving)...)
	return append(checks, kubernetesChecks(ctx, o, driverName, config)...)
}

// exportLooks is how many looks an export is: it is mounted half a dozen times.
const exportLooks = 3

// ExportChecks look at an export. One that hangs has what was found until then.
func ExportChecks(ctx context.Context, o Options, e Export) []Check {
	var checks []Check
	ctx, cancel := context.WithTimeout(ctx, exportLooks*o.Patience)
	defer cancel()
	err := o.Examine(ctx, e, func(c Check) { checks = append(checks, c) })
	if err == nil {
		return checks
	}
	last := "the beginning"
	if len(checks) > 0 {
		last = "the check \"" + checks[len(checks)-1].Name + "\""
	}
	return append(checks, failure(e.name(), fmt.Sprintf("after %s: %v", last, err),
		"see dmesg here and the server's log; if directories "+scratchPrefix+"* are left on the export, remove them"))
}

func within(atMost time.Duration, name string, look func() []Check) []Check {
	checks, err := Within(atMost, func() ([]Check, error) { return look(), nil })
	if err != nil {
		return []Check{hangs(name, err)}
	}
	return checks
}

func hangs(name string, err error) Check {
	return failure(name, err.Error(), "fix the disk, or unmount it")
}

// errNoAnswer is of a look that took too long.
var errNoAnswer = errors.New("gave no answer")

// Within looks at something, at most for a time. A look that takes longer is left
// behind: no call ends a read of a disk that hangs.
func Within[T any](atMost time.Duration, look func() (T, error)) (found T, err error) {
	type answer struct {
		found T
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		found, err := look()
		done <- answer{found, err}
	}()
	select {
	case a := <-done:
		return a.found, a.err
	case <-time.After(atMost):
		return found, fmt.Errorf("%w in %v: does a disk hang (dmesg)?", errNoAnswer, atMost)
	}
}

// Failed tells whether something does not work.
func Failed(checks []Check) bool {
	return slices.ContainsFunc(checks, func(c Check) bool { return c.Result == Failure })
}
