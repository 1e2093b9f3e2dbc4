package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
)

// place is where I/O is measured: the floor, or a volume.
type place struct {
	name string
	dir  string // empty for a device
	file string // the file in dir, or the device, in which fio makes I/O
}

// inDirectory returns the place of a directory.
func inDirectory(name, dir string) *place { return &place{name, dir, filepath.Join(dir, "io")} }

// onDevice returns the place of a device.
func onDevice(name, device string) *place { return &place{name, "", device} }

// load is I/O that is measured.
type load struct {
	name    string
	figures []figure
	goal    string
	run     func(context.Context, meter, *place) *outcome
}

// outcome is the result of one run of a load.
type outcome struct {
	operations  int64
	rate, bytes float64 // per second
	p50, p99    time.Duration
	cpu         time.Duration // of the machine
}

// figure is a number that describes an outcome.
type figure struct {
	unit string
	of   func(*outcome) float64
}

var (
	iops         = figure{"IOPS", func(o *outcome) float64 { return o.rate }}
	bandwidth    = figure{"MiB/s", func(o *outcome) float64 { return o.bytes / mib }}
	transactions = figure{"transactions/s", func(o *outcome) float64 { return o.rate }}
	p50          = figure{"p50 in µs", func(o *outcome) float64 { return float64(o.p50) / 1e3 }}
	p99          = figure{"p99 in µs", func(o *outcome) float64 { return float64(o.p99) / 1e3 }}
)

// perOperation is the CPU time in µs for each operation.
func (o *outcome) perOperation() float64 { return float64(o.cpu) / 1e3 / float64(o.operations) }

// meter measures the CPU time of the machine, because loop devices and filesystems work in threads of the kernel.
type meter struct {
	// others is the number of CPUs that other programs keep busy.
	others float64
}

// newMeter measures the other programs for a duration.
func newMeter(ctx context.Context, d time.Duration) meter {
	start, before := time.Now(), busy()
	measure.Must(sleep(ctx, d))
	return meter{float64(busy()-before) / float64(time.Since(start))}
}

// during calls do and returns the CPU time of the machine without that of other programs.
func (m meter) during(do func()) time.Duration {
	start, before := time.Now(), busy()
	do()
	return max(0, busy()-before-time.Duration(m.others*float64(time.Since(start))))
}

// busy returns the time for which the CPUs of this machine have worked (proc_stat(5)).
func busy() (total time.Duration) {
	const tick = time.Second / 100 // USER_HZ
	line, _, _ := strings.Cut(string(measure.Get(os.ReadFile("/proc/stat"))), "\n")
	fields := strings.Fields(line)
	for _, i := range []int{1, 2, 3, 6, 7} { // user, nice, system, irq, softirq
		total += time.Duration(measure.Get(strconv.ParseInt(fields[i], 10, 64))) * tick
	}
	return total
}

// ioVolume describes a volume in which I/O is measured.
type ioVolume struct {
	name  string
	class class
}

// ioResult contains the outcomes of all loads in all places.
type ioResult struct {
	title    string
	options  options
	places   []*place // the first is the floor
	loads    []load
	outcomes map[ioKey][]*outcome // one for each round
}

type ioKey struct {
	load  string
	place *place
}

// ioFileSize returns the size of the file in which fio makes I/O, in bytes.
func (o options) ioFileSize() int64 {
	if o.quick {
		return 64 * mib
	}
	return gib
}

// ioDiskSize returns the size of the testbed's filesystem in bytes.
func (o options) ioDiskSize() int64 {
	if o.quick {
		return 4 * gib
	}
	return 20 * gib
}

// ioVolumeSize returns the size of the volumes in bytes. btrfs writes changed blocks to other places, and the database
// needs space too.
func (o options) ioVolumeSize() int64 { return 2*o.ioFileSize() + gib }

// printIO measures I/O in the volumes of a directory of a node.
func printIO(ctx context.Context, g *testbed, o options, out io.Writer) {
	size := o.ioVolumeSize()
	volumes := []ioVolume{{"directory", classOf(directoryOf(localTarget), size)}}
	for _, kind := range []string{"ext4", "xfs", btrfs, "block"} {
		volumes = append(volumes, ioVolume{"image, " + kind, classOf(targets.Volume("images-xfs", kind), size)})
	}
	title := "I/O in a pool on " + g.fsType
	if o.in != "" {
		title = "I/O in a pool in " + o.in
	}
	r := &ioResult{title: title, options: o}
	r.measure(ctx, g, g.launchTrivet(o.binary, trivet), inDirectory("file", g.directory("bare")), volumes)
	fmt.Fprintln(out, r)
	fmt.Fprintln(out, r.goals())
}

// printDiskIO measures I/O in volumes that occupy a whole disk. The disks are loop devices, as is the device of the floor.
func printDiskIO(ctx context.Context, g *testbed, o options, out io.Writer) {
	var volumes []ioVolume
	for _, kind := range []string{"ext4", "block"} {
		volumes = append(volumes, ioVolume{"disk, " + kind, classOf(targets.Volume("disks", kind), o.ioVolumeSize())})
	}
	devices := g.blankDisks(ctx, "disks", 1+len(volumes), o.ioVolumeSize())
	defer freeDisks(ctx, devices)
	r := &ioResult{title: "I/O on disks", options: o}
	r.measure(ctx, g, g.launchTrivetWith(o.binary, trivet, poolOfDisks(devices[1:])), onDevice("device", devices[0]), volumes)
	fmt.Fprintln(out, r)
}

// measure measures all loads in the floor and in volumes of a driver, and ends the driver.
func (r *ioResult) measure(ctx context.Context, g *testbed, driver *server, floor *place, volumes []ioVolume) {
	r.places, r.outcomes = []*place{floor}, map[ioKey][]*outcome{}
	clients := driver.connect(ctx, 1)
	var vols []*vol
	// The volumes are also removed when the benchmark is interrupted, because no unmount would detach raw devices.
	defer func() {
		removeVolumes(context.WithoutCancel(ctx), clients, vols)
		driver.stop()
	}()
	for i, v := range volumes {
		vols = append(vols, newVolumes(g.kubelet(driver.Name), "io"+strconv.Itoa(i), 1, v.class)...)
		callAll(ctx, clients, vols[i:], create, controllerPublish, stage, publish)
		if v.class.capability.GetBlock() != nil {
			r.places = append(r.places, onDevice(v.name, vols[i].target))
		} else {
			r.places = append(r.places, inDirectory(v.name, vols[i].target))
		}
	}
	r.measureFio(ctx, g)
	if floor.dir != "" && r.options.postgres != "" {
		r.measureDatabase(ctx, g)
	}
}

// removeVolumes removes the volumes that were created.
func removeVolumes(ctx context.Context, clients []*client, vols []*vol) {
	for _, v := range vols {
		if v.id != "" {
			callAll(ctx, clients, []*vol{v}, unpublish, unstage, controllerUnpublish, remove)
		}
	}
	removeStaging(vols)
}

// measureFio measures the loads of fio.
func (r *ioResult) measureFio(ctx context.Context, g *testbed) {
	f := newFio(ctx, r.options)
	for _, p := range r.places {
		f.fill(ctx, p)
	}
	var loads []load
	for _, profile := range r.options.profiles {
		loads = append(loads, f.load(profile))
	}
	r.run(ctx, g, loads, r.places)
	for _, p := range r.places {
		if p.dir != "" {
			measure.Must(os.Remove(p.file))
		}
	}
}

// measureDatabase measures PostgreSQL in the directories.
func (r *ioResult) measureDatabase(ctx context.Context, g *testbed) {
	d := newDatabase(g, r.options)
	directories := slices.DeleteFunc(slices.Clone(r.places), func(p *place) bool { return p.dir == "" })
	for _, p := range directories {
		d.create(ctx, p)
	}
	r.run(ctx, g, []load{d.load()}, directories)
}

// run measures loads in all rounds. In each round, the places take turns in another order.
func (r *ioResult) run(ctx context.Context, g *testbed, loads []load, places []*place) {
	r.loads = append(r.loads, loads...)
	for range r.options.rounds {
		m := newMeter(ctx, r.options.duration)
		for _, l := range loads {
			for _, i := range rand.Perm(len(places)) {
				p := places[i]
				if p.dir != "" {
					measure.Sync(p.dir)
				}
				g.Settle()
				at := ioKey{l.name, p}
				r.outcomes[at] = append(r.outcomes[at], l.run(ctx, m, p))
			}
		}
	}
}

// of returns a number for each round of a load in a place, in ascending order.
func (r *ioResult) of(l load, p *place, number func(*outcome) float64) (values []float64) {
	for _, o := range r.outcomes[ioKey{l.name, p}] {
		values = append(values, number(o))
	}
	slices.Sort(values)
	return values
}

// ratio returns the median of a number in a place divided by the median in the floor.
func (r *ioResult) ratio(l load, p *place, number func(*outcome) float64) float64 {
	return median(r.of(l, p, number)) / median(r.of(l, r.places[0], number))
}

// median returns the median of values in ascending order.
func median(ascending []float64) float64 { return ascending[len(ascending)/2] }

// String returns a table with a row for each figure of each load in each place.
func (r *ioResult) String() string {
	t := markdown.Table{{"I/O", "in", "unit", "median", "min", "max", "ratio", "CPU in µs per operation", "ratio"}}
	for _, l := range r.loads {
		for _, f := range l.figures {
			for _, p := range r.places {
				values := r.of(l, p, f.of)
				if len(values) == 0 {
					continue // a device has no database
				}
				cells := []string{l.name, p.name, f.unit, whole(median(values)), whole(values[0]), whole(values[len(values)-1]), times(r.ratio(l, p, f.of))}
				t.Row(append(cells, r.cpuCells(l, p)...)...)
			}
		}
	}
	return fmt.Sprintf("### %s\n\n%s; %d rounds of %v, places in turns; the file has %s.\n", r.title, machine(), r.options.rounds, r.options.duration, mebibytes(r.options.ioFileSize())) +
		"\"ratio\" is to the first place. CPU is the time of the whole machine, with fio or PostgreSQL and the threads of the kernel, without the start of fio and without what other programs used before the round.\n\n" + t.Text(true)
}

// cpuCells returns the CPU time for each operation, and its ratio to the floor. They are empty if other programs used so much
// that the time is not known.
func (r *ioResult) cpuCells(l load, p *place) []string {
	cells := []string{"", ""}
	if own := median(r.of(l, p, (*outcome).perOperation)); own > 0 {
		cells[0] = fmt.Sprintf("%.1f", own)
		if ratio := r.ratio(l, p, (*outcome).perOperation); !math.IsInf(ratio, 0) {
			cells[1] = times(ratio)
		}
	}
	return cells
}

// whole returns a number without decimals.
func whole(n float64) string { return strconv.FormatFloat(n, 'f', 0, 64) }

// machine describes the machine.
func machine() string {
	var name unix.Utsname
	measure.Must(unix.Uname(&name))
	return fmt.Sprintf("Linux %s, %d CPUs", unix.ByteSliceToString(name.Release[:]), runtime.NumCPU())
}

// goals returns a table of the goals and the results.
func (r *ioResult) goals() string {
	t := markdown.Table{{"goal", "result"}}
	for _, l := range r.loads {
		if l.goal == "" {
			continue
		}
		var results []string
		for _, p := range r.places[1:] {
			results = append(results, fmt.Sprintf("%s (%s)", times(r.ratio(l, p, l.figures[0].of)), p.name))
		}
		t.Row(fmt.Sprintf("%s, %s: %s", l.name, l.figures[0].unit, l.goal), strings.Join(results, ", "))
	}
	return "#### Goals and results\n\n" + t.Text(false)
}
