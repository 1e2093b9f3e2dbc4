// Command bench measures a driver beside a floor: a gRPC server that makes only the system
// calls, without checks, records and durability. Both run at the same time on the same new
// filesystem and take turns, so that other load on the machine affects both. Compare the
// ratios, not the times.
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
	"slices"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/internal/mountns"
)

// Hidden first arguments, with which the command starts itself.
const (
	argFloor   = "floor"   // as a floor
	argMounter = "mounter" // as one that mounts for each call
)

type options struct {
	binary  string
	volumes int
	rounds  int
	quick   bool
	served  string
	// One of these selects the only part that is measured.
	directories, snapshots, manager bool
	// target has the directories that are measured, in package targets.
	target string
	// pods is how many pods the volume manager has, idle how long it gets no work.
	pods int
	idle time.Duration
}

func parse(args []string) (options, error) {
	var o options
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.StringVar(&o.binary, "binary", "bin/trivet", "`file` of the driver to measure")
	flags.IntVar(&o.volumes, "volumes", 100, "`number` of volumes that go through their life in one pass")
	flags.IntVar(&o.rounds, "rounds", 3, "`number` of rounds; each is a pass in one order of the servers and one in the other")
	flags.BoolVar(&o.quick, "quick", false, "one round, and a tenth of the volumes where they are many")
	flags.BoolVar(&o.directories, "directories", false, "measure directories of local filesystems, and nothing else")
	flags.StringVar(&o.target, "target", localTarget, "the `target` of backend/backendtest/targets whose directories are measured; the driver must serve its kind")
	flags.BoolVar(&o.snapshots, "snapshots", false, "measure snapshots and copies of images, and nothing else")
	flags.BoolVar(&o.manager, "volume-manager", false, "measure the volume manager beside the driver's own calls, and nothing else")
	flags.IntVar(&o.pods, "pods", 100, "`number` of pods that the volume manager has")
	flags.DurationVar(&o.idle, "idle", time.Minute, "how long the volume manager gets no work")
	flags.StringVar(&o.served, "nfs", "", "`directory` that the NFS server at "+nfsServer+" exports as its root: measure on that, and nothing else")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 || o.volumes < 1 || o.rounds < 1 || o.pods < 4 {
		return o, fmt.Errorf("want flags only, --volumes and --rounds of 1 or more, and --pods of 4 or more")
	}
	if o.quick {
		o.rounds, o.pods = 1, min(o.pods, 10)
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
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) > 0 && args[0] == argFloor {
		return serveFloor(ctx, args[1:])
	}
	if len(args) > 0 && args[0] == argMounter {
		return serveMounter(ctx, args[1:])
	}
	o, err := parse(args)
	if err != nil {
		return err
	}
	if os.Getuid() != 0 {
		return errors.New("this mounts and attaches for real: run it as root")
	}
	if err := mountns.Enter(); err != nil {
		return err
	}
	return bench(ctx, o, os.Stdout)
}

func bench(ctx context.Context, o options, out io.Writer) error {
	for _, p := range o.parts() {
		if err := p.run(ctx, o, out); err != nil {
			return err
		}
	}
	fmt.Fprintln(out, "Nothing is left behind: no process, mount, loop device or file.")
	return nil
}

// part is a set of measurements on one ground.
type part struct {
	fsType string // of the ground; empty for an export
	// measure prints each result when it is complete.
	measure func(context.Context, *ground, options, io.Writer) error
}

func (o options) parts() []part {
	if o.served != "" {
		return []part{{"", printNFS}}
	}
	directories := []part{{btrfs, printDirectories}, {xfs, printDirectories}}
	snapshots := []part{{xfs, printSnapshots}, {btrfs, printSnapshots}, {ext4, printPlainCopies}}
	manager := []part{{xfs, printManager}}
	switch {
	case o.directories:
		return directories
	case o.snapshots:
		return snapshots
	case o.manager:
		return manager
	}
	return slices.Concat([]part{{xfs, printImages}}, directories, snapshots, manager)
}

func (p part) run(ctx context.Context, o options, out io.Writer) error {
	g, err := newGround(ctx, p.fsType, o.served)
	if errors.Is(err, errNoSimpleQuotas) {
		fmt.Fprintln(out, "Left out, directories on btrfs:", err)
		return nil
	}
	if err != nil {
		return err
	}
	err = p.measure(ctx, g, o, out)
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	if cerr := g.clear(); cerr != nil {
		return errors.Join(err, fmt.Errorf("cleaning up: %w", cerr))
	}
	return err
}

func printNFS(ctx context.Context, g *ground, o options, out io.Writer) error {
	result, err := measureNFS(ctx, g, o)
	if err == nil {
		fmt.Fprintln(out, result)
	}
	return err
}

func printDirectories(ctx context.Context, g *ground, o options, out io.Writer) error {
	life, err := measureDirectories(ctx, g, o)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, life)
	trash, err := measureTrash(ctx, g, o)
	if err == nil {
		fmt.Fprintln(out, trash)
	}
	return err
}

func printSnapshots(ctx context.Context, g *ground, o options, out io.Writer) error {
	result, err := measureSnapshots(ctx, g, o)
	if err == nil {
		fmt.Fprintln(out, result)
	}
	return err
}

func printPlainCopies(ctx context.Context, g *ground, o options, out io.Writer) error {
	result, err := measurePlainCopies(ctx, g, o)
	if err == nil {
		fmt.Fprintln(out, result)
	}
	return err
}

func printManager(ctx context.Context, g *ground, o options, out io.Writer) error {
	driver, manager, err := startManager(ctx, g, o.binary)
	if err != nil {
		return err
	}
	pods, err := measureManaged(ctx, g, o, driver, manager)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, pods)
	rest, err := measureRest(ctx, g, o, manager)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, rest)
	return errors.Join(manager.stop(), driver.stop())
}

func printImages(ctx context.Context, g *ground, o options, out io.Writer) error {
	life, err := measureLife(ctx, g, o)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, life)
	many, err := measureMany(ctx, g, o)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, many)
	start, err := measureStart(ctx, g, o)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, start)
	fmt.Fprintln(out, wanted(life, many, start))
	return nil
}
