// Command bench compares the driver with floors. A floor is a gRPC server that only makes the
// system calls that a CSI call needs, without validation, records or fsyncs. Both run at the same
// time on the same new filesystem and take turns, so that other load on the machine affects both.
// Compare the ratios, not the times.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/test/measure"
)

// First arguments with which the benchmark starts its own executable as a server.
const (
	argFloor   = "floor"
	argMounter = "mounter"
)

type options struct {
	binary  string
	volumes int
	rounds  int
	quick   bool
	// served is the directory that the NFS server exports; empty to measure on local filesystems.
	served string
	// groups are the paths of the disks for the volume groups; empty to measure no logical volumes.
	groups string
	// At most one of these is true. It selects the only part that is measured.
	directories, snapshots, manager, io bool
	// in is a directory in which I/O is measured; empty to measure on new filesystems.
	in string
	// duration is the duration of one measurement of I/O, and profiles are those of fio.
	duration time.Duration
	profiles []ioProfile
	// postgres is the directory of the programs of PostgreSQL; empty if it is not installed.
	postgres string
	// target is the name of a target of package targets.
	target string
	// pods is the number of pods of the volume manager.
	pods int
	// idle is the duration of the measurement of an idle volume manager.
	idle time.Duration
}

// minDuration is the minimum duration of one measurement of I/O.
const minDuration = 100 * time.Millisecond

// parse parses and checks the flags.
func parse(args []string) (options, error) {
	o := options{profiles: ioProfiles}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.StringVar(&o.binary, "binary", "bin/trivet", "`file` of the driver to measure")
	flags.IntVar(&o.volumes, "volumes", 100, "`number` of volumes that are created, used and deleted in one pass")
	flags.IntVar(&o.rounds, "rounds", 3, "`number` of rounds of two passes; the second pass calls the servers in reverse order; with --io, of one pass")
	flags.BoolVar(&o.quick, "quick", false, "run one round, with fewer pods, volumes and files and with less data")
	flags.BoolVar(&o.directories, "directories", false, "measure only directories of local filesystems")
	flags.StringVar(&o.target, "target", "", "measure only the kinds of volume of this `target` of backend/backendtest/targets, all of which "+
		"the driver must serve; with --directories, measure the directories of this target (default "+localTarget+"); targets on exports also need --nfs")
	flags.BoolVar(&o.snapshots, "snapshots", false, "measure only snapshots, clones and restored volumes of images")
	flags.BoolVar(&o.manager, "volume-manager", false, "measure only the volume manager, beside a client that calls the driver directly")
	flags.IntVar(&o.pods, "pods", 100, "`number` of pods that the volume manager has")
	flags.DurationVar(&o.idle, "idle", time.Minute, "how long the idle volume manager is measured")
	flags.BoolVar(&o.io, "io", false, "measure only I/O in volumes, with fio and PostgreSQL")
	flags.StringVar(&o.in, "in", "", "with --io, measure in this existing `directory` instead of new filesystems")
	flags.DurationVar(&o.duration, "duration", 3*time.Second, "how long each measurement of I/O takes")
	flags.StringVar(&o.groups, "groups", "", "measure only logical volumes, in new volume groups on two unused `disks`, separated by a comma")
	flags.StringVar(&o.served, "nfs", "", "measure only on the `directory` that the NFS server at "+nfsServer+" exports as its root")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 || o.volumes < 1 || o.rounds < 1 || o.pods < 4 {
		return o, errors.New("bench accepts only flags; --volumes and --rounds must be 1 or more, --pods 4 or more")
	}
	if o.in != "" && !o.io || o.duration < minDuration {
		return o, fmt.Errorf("--in needs --io, and --duration must be %v or more", minDuration)
	}
	if o.quick {
		o.rounds, o.pods, o.duration = 1, min(o.pods, 10), min(o.duration, time.Second)
	}
	for _, path := range []*string{&o.binary, &o.in} {
		if *path == "" {
			continue
		}
		var err error
		if *path, err = filepath.Abs(*path); err != nil {
			return o, err
		}
	}
	return o, nil
}

func main() {
	roles := map[string]func(context.Context, []string) error{argFloor: serveFloor, argMounter: serveMounter}
	measure.Main("bench", roles, run)
}

func run(ctx context.Context, args []string) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	if err := measure.Isolate(); err != nil {
		return err
	}
	if o.io {
		if _, err := exec.LookPath("fio"); err != nil {
			return fmt.Errorf("--io: %w: install fio (on Debian: make deps-io)", err)
		}
		if o.postgres = postgresPrograms(); o.postgres == "" {
			fmt.Println("Skipped pgbench: PostgreSQL is not installed (on Debian: make deps-io)")
		}
		fmt.Println(profileTable())
	}
	for _, p := range o.parts() {
		if err := p.run(ctx, o, os.Stdout); err != nil {
			return err
		}
	}
	fmt.Println("Nothing is left behind: no process, mount, loop device or file.")
	return nil
}

// part is a set of measurements in one testbed.
type part struct {
	fsType string // of the testbed; empty for an export or volume groups
	// measure prints each result when it is complete.
	measure func(context.Context, *testbed, options, io.Writer)
}

// parts returns the parts that the options select, by default all parts that need no NFS server.
func (o options) parts() []part {
	directories := []part{{"btrfs", printDirectories}, {"xfs", printDirectories}}
	snapshots := []part{{"xfs", printSnapshots}, {"btrfs", printSnapshots}, {"ext4", printPlainCopies}}
	manager := []part{{"xfs", printManager}}
	switch {
	case o.in != "":
		return []part{{"", printIO}}
	case o.io:
		return []part{{"xfs", printIO}, {"ext4", printIO}, {btrfs, printIO}, {"xfs", printDiskIO}}
	case o.directories:
		return directories
	case o.groups != "":
		return []part{groupPart(thickKind), groupPart(thinKind), groupPart(encryptedKind), {"", printGrowth}}
	case o.target != "" && o.served != "":
		return []part{{"", printTarget}}
	case o.target != "":
		return []part{{filesystemOf(o.target), printTarget}}
	case o.served != "":
		return []part{{"", printNFS}}
	case o.snapshots:
		return snapshots
	case o.manager:
		return manager
	}
	return slices.Concat([]part{{"xfs", printImages}}, directories, snapshots, manager)
}

// diskSize is the size in bytes of the testbed's filesystem.
const diskSize = 256 << 30

// hasSimpleQuotas reports whether the btrfs of this kernel has simple quotas.
func hasSimpleQuotas() bool {
	_, err := os.Stat("/sys/fs/btrfs/features/simple_quota")
	return err == nil
}

// run creates the testbed and measures the part in it.
func (p part) run(ctx context.Context, o options, out io.Writer) error {
	measureIn := func(g *measure.Testbed) { p.measure(ctx, &testbed{g, p.fsType, o.served}, o, out) }
	if o.groups != "" {
		return onGroups(ctx, strings.Split(o.groups, ","), measureIn)
	}
	if o.in != "" {
		return measure.InDirectory(ctx, o.in, measureIn)
	}
	if p.fsType == "" {
		return measure.OnExport(ctx, nfsServer+":/", measureIn)
	}
	if o.io {
		return measure.OnFullImage(ctx, p.fsType, o.ioDiskSize(), measureIn)
	}
	if p.fsType == btrfs && !hasSimpleQuotas() {
		fmt.Fprintln(out, "Skipped the measurements on btrfs: this kernel has no btrfs simple quotas, which need Linux 6.7")
		return nil
	}
	return measure.OnFilesystem(ctx, p.fsType, diskSize, func(g *measure.Testbed) {
		if p.fsType == btrfs {
			enableSimpleQuotas(g.Disk)
		}
		measureIn(g)
	})
}

func printNFS(ctx context.Context, g *testbed, o options, out io.Writer) {
	fmt.Fprintln(out, measureNFS(ctx, g, o))
}

// groupPart returns the part that measures a kind of logical volumes.
func groupPart(k groupKind) part {
	return part{"", func(ctx context.Context, g *testbed, o options, out io.Writer) {
		fmt.Fprintln(out, measureGroup(ctx, g, o, k))
	}}
}

func printGrowth(ctx context.Context, g *testbed, o options, out io.Writer) {
	fmt.Fprintln(out, measureGrowth(ctx, g, o))
}

func printDirectories(ctx context.Context, g *testbed, o options, out io.Writer) {
	o.target = cmp.Or(o.target, localTarget)
	fmt.Fprintln(out, measureDirectories(ctx, g, o))
	fmt.Fprintln(out, measureTrash(ctx, g, o))
}

func printSnapshots(ctx context.Context, g *testbed, o options, out io.Writer) {
	fmt.Fprintln(out, measureSnapshots(ctx, g, o))
}

func printPlainCopies(ctx context.Context, g *testbed, o options, out io.Writer) {
	fmt.Fprintln(out, measurePlainCopies(ctx, g, o))
}

func printManager(ctx context.Context, g *testbed, o options, out io.Writer) {
	driver, manager := startManager(ctx, g, o.binary)
	fmt.Fprintln(out, measureManaged(ctx, g, o, driver, manager))
	fmt.Fprintln(out, measureIdleManager(ctx, g, o, manager))
	manager.stop()
	driver.stop()
}

func printImages(ctx context.Context, g *testbed, o options, out io.Writer) {
	life := measureLife(ctx, g, o)
	fmt.Fprintln(out, life)
	others := measureFilesystems(ctx, g, o)
	fmt.Fprintln(out, filesystemTable(others))
	many := measureMany(ctx, g, o)
	fmt.Fprintln(out, many)
	start := measureStart(ctx, g, o)
	fmt.Fprintln(out, start)
	fmt.Fprintln(out, goals(life, others, many, start))
}
