// Command scale measures the controller's driver with many nodes: hundreds of nodes' drivers run in a
// few processes on this machine, each with its own pool on one new xfs. They are called by mutual TLS
// over TCP, as in a cluster. The controller's driver is a process of its own, so that its resources can
// be measured.
//
// Calls through it and direct calls to the nodes alternate, so that noise affects both alike.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/trivet-csi/trivet/internal/mountns"
)

// argNodes is a hidden first argument, with which the command starts itself as the drivers
// of nodes.
const argNodes = "nodes"

type options struct {
	binary         string
	nodes, volumes int
}

func parse(args []string) (options, error) {
	var o options
	flags := flag.NewFlagSet("scale", flag.ContinueOnError)
	flags.StringVar(&o.binary, "binary", "bin/trivet", "`file` of the driver to measure")
	flags.IntVar(&o.nodes, "nodes", 500, "`number` of nodes; a tenth and two fifths of them are measured first")
	flags.IntVar(&o.volumes, "volumes", 20_000, "`number` of volumes, as many on each node")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 || o.nodes < 20 || o.volumes < o.nodes {
		return o, errors.New("want flags only, --nodes of 20 or more, and no fewer --volumes")
	}
	var err error
	o.binary, err = filepath.Abs(o.binary)
	return o, err
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) > 0 && args[0] == argNodes {
		return serveNodes(ctx, args[1:])
	}
	o, err := parse(args)
	if err != nil {
		return err
	}
	if os.Getuid() != 0 {
		return errors.New("this mounts for real: run it as root")
	}
	if err := mountns.Enter(); err != nil {
		return err
	}
	if err := allowFiles(o.nodes); err != nil {
		return err
	}
	return bench(ctx, o, os.Stdout)
}

// allowFiles raises the limit of open files for this process and its children: a node's driver has a
// dozen, and more during calls.
func allowFiles(nodes int) error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	limit.Cur = max(limit.Cur, 1000+uint64(nodes)*20)
	limit.Max = max(limit.Cur, limit.Max)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("raising the limit of open files to %d: %w: raise it where this is started (ulimit -Hn), or take fewer --nodes", limit.Cur, err)
	}
	return nil
}

func bench(ctx context.Context, o options, out io.Writer) error {
	g, err := newGround(ctx)
	if err != nil {
		return err
	}
	err = measure(ctx, g, o, out)
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	if cerr := g.clear(); cerr != nil {
		return errors.Join(err, fmt.Errorf("cleaning up: %w", cerr))
	}
	if err == nil {
		fmt.Fprintln(out, "Nothing is left behind: no process, mount, loop device or file.")
	}
	return err
}

// measure measures a few nodes, then all of them, then a drop of some.
func measure(ctx context.Context, g *ground, o options, out io.Writer) error {
	var sizes []*size
	for _, nodes := range []int{o.nodes / 10, o.nodes * 2 / 5, o.nodes} {
		f, err := g.newFleet(ctx, o.binary, nodes, o.volumes/o.nodes)
		if err != nil {
			return err
		}
		s, err := measureSize(ctx, f)
		if err != nil {
			return err
		}
		sizes = append(sizes, s)
		if nodes == o.nodes {
			if err := report(ctx, f, sizes, out); err != nil {
				return err
			}
		}
		if err := f.stop(); err != nil {
			return err
		}
	}
	return nil
}

// report prints the measurements.
func report(ctx context.Context, f *fleet, sizes []*size, out io.Writer) error {
	last := sizes[len(sizes)-1]
	fmt.Fprintln(out, last.calls())
	fmt.Fprintln(out, last.lists())
	fmt.Fprintln(out, growth(sizes))
	d, err := measureDrop(ctx, f)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, d)
	fmt.Fprintln(out, wanted(last, d))
	return nil
}
