// Command scale measures the controller's driver with many nodes. The drivers of hundreds of nodes run
// in a few processes on this machine, each with its own pool on one new xfs. The controller's driver
// calls them with mutual TLS over TCP, as in a cluster. It is a separate process, so that its resources
// can be measured.
//
// Calls through the controller's driver and direct calls to the nodes alternate, so that other load on
// the machine affects both.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/test/measure"
)

// argNodes is the first argument of the processes that run the drivers of nodes.
const argNodes = "nodes"

type options struct {
	binary         string
	nodes, volumes int
}

// parse parses and checks the flags.
func parse(args []string) (options, error) {
	var o options
	flags := flag.NewFlagSet("scale", flag.ContinueOnError)
	flags.StringVar(&o.binary, "binary", "bin/trivet", "`file` of the driver to measure")
	flags.IntVar(&o.nodes, "nodes", 500, "`number` of nodes; first, a tenth of this number is measured")
	flags.IntVar(&o.volumes, "volumes", 20_000, "`number` of volumes that exist during all measurements, distributed evenly over the nodes")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 || o.nodes < 20 || o.volumes < o.nodes {
		return o, errors.New("scale accepts only flags; --nodes must be 20 or more, and --volumes at least --nodes")
	}
	var err error
	o.binary, err = filepath.Abs(o.binary)
	return o, err
}

func main() {
	measure.Main("scale", map[string]func(context.Context, []string) error{argNodes: serveNodes}, run)
}

func run(ctx context.Context, args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if err := measure.Isolate(); err != nil {
		return err
	}
	if err := allowFiles(o.nodes); err != nil {
		return err
	}
	err = measure.OnFilesystem(ctx, "xfs", diskSize, func(g *measure.Testbed) { measureAll(ctx, g, o, os.Stdout) })
	if err == nil {
		fmt.Println("Nothing is left behind: no process, mount, loop device or file.")
	}
	return err
}

// allowFiles raises the limit of open files for this process and its children. Each node's driver opens a dozen files, and
// more during calls. This process and the controller's driver have one connection to each node.
func allowFiles(nodes int) error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	limit.Cur = max(limit.Cur, 1000+uint64(max(nodes, nodesPerProcess*20)))
	limit.Max = max(limit.Cur, limit.Max)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("raising the limit of open files to %d: %w: raise the hard limit with ulimit -Hn before the start, or use fewer --nodes", limit.Cur, err)
	}
	return nil
}

// diskSize is the size of the xfs in bytes.
const diskSize = 64 << 30

// measureAll measures the calls with a tenth and with all of the nodes. With all nodes it then measures a restart of the
// controller's driver, and an outage (measureDrop): the drivers of some nodes stop answering, and recover.
func measureAll(ctx context.Context, g *measure.Testbed, o options, out io.Writer) {
	var sizes []*size
	for _, nodes := range []int{o.nodes / 10, o.nodes} {
		f := newFleet(ctx, g, o.binary, nodes, o.volumes/o.nodes)
		progressf("%d nodes: measuring calls and lists", nodes)
		sizes = append(sizes, measureSize(ctx, f))
		if nodes == o.nodes {
			report(ctx, f, sizes, out)
		}
		f.stop()
	}
}

// progressf writes a message to stderr, because a measurement with thousands of nodes takes minutes.
func progressf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, time.Now().Format(time.TimeOnly)+" "+format+"\n", args...)
}

// report prints the measurements. It measures the restart and the outage after the other results are printed.
func report(ctx context.Context, f *fleet, sizes []*size, out io.Writer) {
	last := sizes[len(sizes)-1]
	fmt.Fprintln(out, last.calls())
	fmt.Fprintln(out, last.lists())
	fmt.Fprintln(out, growth(sizes))
	progressf("measuring a restart")
	r := measureRestart(ctx, f)
	fmt.Fprintln(out, r)
	progressf("measuring an outage")
	d := measureDrop(ctx, f)
	fmt.Fprintln(out, d)
	fmt.Fprintln(out, goals(last, r, d))
}
