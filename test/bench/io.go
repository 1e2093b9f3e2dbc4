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
	cpu         float64 // in µs, of the machine; NaN if it is not known
}

// figure is a number that describes an outcome; NaN if it is not known.
type figure struct {
	unit     string
	decimals int
	of       func(*outcome) float64
}

var (
	iops         = figure{"IOPS", 0, func(o *outcome) float64 { return o.rate }}
	bandwidth    = figure{"MiB/s", 0, func(o *outcome) float64 { return o.bytes / mib }}
	transactions = figure{"transactions/s", 0, func(o *outcome) float64 { return o.rate }}
	p50          = figure{"p50 in µs", 0, func(o *outcome) float64 { return microseconds(o.p50) }}
	p99          = figure{"p99 in µs", 0, func(o *outcome) float64 { return microseconds(o.p99) }}
	// perOperation is a figure of all loads.
	perOperation = figure{"CPU in µs per operation", 1, func(o *outcome) float64 { return o.cpu / float64(o.operations) }}
)

// microseconds returns a duration in µs.
func microseconds(d time.Duration) float64 { return float64(d) / 1e3 }

// meter measures the CPU time of the machine, because loop devices and filesystems work in threads of the kernel.
type meter struct {
	// pause is the time before and after a run in which other programs are measured.
	pause time.Duration
}

// The CPU time of a run is not known if other programs used more than mostOthers of it, or if that changed by more than
// mostChange of it from before the run to after it.
const (
	mostOthers = 0.2
	mostChange = 0.1
)

// during calls do and returns the CPU time of the machine in µs, without that of other programs, and without fixed, which do
// always takes.
func (m meter) during(ctx context.Context, fixed float64, do func()) float64 {
	before := m.others(ctx)
	start, earlier := time.Now(), busy()
	do()
	elapsed, total := microseconds(time.Since(start)), microseconds(busy()-earlier)
	return ownTime(total-fixed, before*elapsed, m.others(ctx)*elapsed)
}

// others returns the number of CPUs that other programs keep busy.
func (m meter) others(ctx context.Context) float64 {
	start, before := time.Now(), busy()
	measure.Must(sleep(ctx, m.pause))
	return float64(busy()-before) / float64(time.Since(start))
}

// ownTime returns a CPU time without that of other programs. before and after are what they would have used in the run if they
// had worked as before it and as after it. If they used or changed too much, ownTime returns NaN.
func ownTime(total, before, after float64) float64 {
	others := (before + after) / 2
	own := total - others
	if own <= 0 || others > mostOthers*own || math.Abs(after-before) > mostChange*own {
		return math.NaN()
	}
	return own
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

// meter returns the meter of the runs.
func (o options) meter() meter { return meter{o.duration / 4} }

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
	m := r.options.meter()
	for range r.options.rounds {
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

// of returns a number for each round of a load in a place in which it is known, in ascending order; nil if it is not known in more
// than half of the rounds.
func (r *ioResult) of(l load, p *place, number func(*outcome) float64) []float64 {
	rounds := r.outcomes[ioKey{l.name, p}]
	var values []float64
	for _, o := range rounds {
		if v := number(o); !math.IsNaN(v) {
			values = append(values, v)
		}
	}
	if 2*len(values) <= len(rounds) {
		return nil
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

// String returns a table with a row for each figure of each load, and a column for each place.
func (r *ioResult) String() string {
	head := []string{"I/O", "unit"}
	for _, p := range r.places {
		head = append(head, p.name)
	}
	t := markdown.Table{head}
	for _, l := range r.loads {
		for _, f := range append(slices.Clone(l.figures), perOperation) {
			row := []string{l.name, f.unit}
			for _, p := range r.places {
				row = append(row, r.cell(l, p, f))
			}
			t.Row(row...)
		}
	}
	return fmt.Sprintf("### %s\n\n%s; %d rounds of %v, places in turns; the file has %s.\n\n", r.title, machine(), r.options.rounds, r.options.duration, mebibytes(r.options.ioFileSize())) + t.Text(true)
}

// cell returns the median of a figure in a place, the minimum and maximum in parentheses, and the ratio of the medians to the floor. It is
// empty if the figure is not known.
func (r *ioResult) cell(l load, p *place, f figure) string {
	values := r.of(l, p, f.of)
	if len(values) == 0 {
		return ""
	}
	text := func(n float64) string { return strconv.FormatFloat(n, 'f', f.decimals, 64) }
	cell := fmt.Sprintf("%s (%s–%s)", text(median(values)), text(values[0]), text(values[len(values)-1]))
	if p != r.places[0] && len(r.of(l, r.places[0], f.of)) > 0 {
		cell += " " + times(r.ratio(l, p, f.of))
	}
	return cell
}

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
