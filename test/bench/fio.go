package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
)

// ioProfile is a load that fio makes.
type ioProfile struct {
	name    string
	options string // of fio
	figures []figure
	goal    string // for the first figure of an image, compared with the floor; empty if there is none
	like    string // the programs that have the same profile
}

// The goals of images.
const (
	goalRandom  = "at least 0.9 × the floor"
	goalFlush   = "at least 0.75 × the floor"
	goalLatency = "at most 1.2 × the floor"
)

const direct = "--ioengine=libaio --direct=1 "

// ioProfiles are the profiles that are measured. Programs such as etcd and databases write their logs through the page
// cache, with fdatasync(2).
var ioProfiles = []ioProfile{
	{"4k random read, depth 32", direct + "--rw=randread --bs=4k --iodepth=32", []figure{iops}, goalRandom, ""},
	{"4k random write, depth 32", direct + "--rw=randwrite --bs=4k --iodepth=32", []figure{iops}, goalRandom, ""},
	{"4k random read, depth 64", direct + "--rw=randread --bs=4k --iodepth=64", []figure{iops}, "", "kubestr, kbench, dbench"},
	{"4k random write, depth 64", direct + "--rw=randwrite --bs=4k --iodepth=64", []figure{iops}, "", "kubestr, kbench, dbench"},
	{"4k random, 75 % read, depth 64", direct + "--rw=randrw --rwmixread=75 --bs=4k --iodepth=64", []figure{iops}, "", "dbench"},
	{"4k random read, depth 1", direct + "--rw=randread --bs=4k --iodepth=1", []figure{p50, p99}, "", "kbench"},
	{"4k random write, depth 1", direct + "--rw=randwrite --bs=4k --iodepth=1", []figure{p50, p99}, "", "kbench"},
	{"128k sequential read, depth 64", direct + "--rw=read --bs=128k --iodepth=64", []figure{bandwidth}, "", "kbench"},
	{"128k sequential write, depth 64", direct + "--rw=write --bs=128k --iodepth=64", []figure{bandwidth}, "", "kbench"},
	{"4k write and fdatasync", "--ioengine=psync --rw=write --bs=4k --fdatasync=1", []figure{iops}, goalFlush, ""},
	{"4k write and fdatasync, 100 a second", "--ioengine=psync --rw=write --bs=4k --fdatasync=1 --rate_iops=100", []figure{p50, p99}, goalLatency, ""},
}

// profileTable describes the profiles.
func profileTable() string {
	t := markdown.Table{{"profile", "options of fio", "the same as in"}}
	for _, profile := range ioProfiles {
		t.Row(profile.name, "`"+profile.options+"`", profile.like)
	}
	return t.Text(false)
}

// fio makes I/O in a file or device.
type fio struct {
	size     int64 // of the file in bytes
	duration time.Duration
	start    float64 // the CPU time in µs that fio takes to start and to end
}

// newFio measures the start of fio, which takes 0.1 s of CPU time.
func newFio(ctx context.Context, o options) fio {
	f := fio{size: o.ioFileSize(), duration: o.duration}
	var starts []float64
	for range 5 {
		starts = append(starts, o.meter().during(ctx, 0, func() {
			measure.Must(measure.Command(ctx, "fio", f.command("none", "--ioengine=null --rw=write --number_ios=1")...))
		}))
	}
	slices.Sort(starts)
	f.start = median(starts)
	return f
}

// command returns the arguments of fio(1) for a file or device.
func (f fio) command(path, options string) []string {
	// With --thread there is only one process, which is killed when the benchmark is interrupted. The latency is the whole
	// one, because btrfs makes direct I/O while it is submitted.
	return append([]string{"--name=io", "--thread", "--output-format=json", "--clat_percentiles=0", "--lat_percentiles=1", "--randrepeat=0", fmt.Sprintf("--size=%d", f.size), "--filename=" + path}, strings.Fields(options)...)
}

// fill writes the whole file, so that no profile allocates blocks, except on btrfs, which writes each change to new blocks.
func (f fio) fill(ctx context.Context, p *place) {
	measure.Must(measure.Command(ctx, "fio", f.command(p.file, direct+"--rw=write --bs=1M --iodepth=8 --end_fsync=1")...))
}

// load returns the load of a profile.
func (f fio) load(profile ioProfile) load {
	timed := fmt.Sprintf("%s --time_based --runtime=%dms", profile.options, f.duration.Milliseconds())
	return load{profile.name, profile.figures, profile.goal, func(ctx context.Context, m meter, p *place) *outcome {
		var out []byte
		cpu := m.during(ctx, f.start, func() {
			c := exec.CommandContext(ctx, "fio", f.command(p.file, timed)...)
			var stderr bytes.Buffer
			c.Stderr = &stderr
			var err error
			if out, err = c.Output(); err != nil {
				measure.Must(fmt.Errorf("%s in %s: fio: %w: %s%s", profile.name, p.name, err, stderr.Bytes(), out))
			}
		})
		o, err := parseFio(out)
		if err != nil {
			measure.Must(fmt.Errorf("%s in %s: %w", profile.name, p.name, err))
		}
		o.cpu = cpu
		return o
	}}
}

// fioReport is the part of the JSON output of fio that the benchmark needs.
type fioReport struct {
	Jobs []struct {
		Read, Write fioDirection
		Sync        struct {
			Latency fioLatency `json:"lat_ns"`
		}
	}
}

// fioDirection contains the results of all reads or of all writes.
type fioDirection struct {
	Operations int64      `json:"total_ios"`
	Rate       float64    `json:"iops"`
	Bytes      float64    `json:"bw_bytes"` // per second
	Latency    fioLatency `json:"lat_ns"`
}

// fioLatency contains latencies in ns. The keys have six decimals.
type fioLatency struct{ Percentile map[string]int64 }

func (l fioLatency) at(percent string) time.Duration {
	return time.Duration(l.Percentile[percent+".000000"])
}

// parseFio reads the output of fio for one job. Notes of fio can precede the JSON. The latency is that of fdatasync if the
// job calls it.
func parseFio(out []byte) (*outcome, error) {
	_, text, _ := bytes.Cut(out, []byte("{"))
	var report fioReport
	if err := json.Unmarshal(append([]byte("{"), text...), &report); err != nil {
		return nil, fmt.Errorf("output of fio: %w: %s", err, out)
	}
	if len(report.Jobs) != 1 {
		return nil, fmt.Errorf("output of fio: expected one job: %s", out)
	}
	job := report.Jobs[0]
	o := &outcome{
		operations: job.Read.Operations + job.Write.Operations,
		rate:       job.Read.Rate + job.Write.Rate, bytes: job.Read.Bytes + job.Write.Bytes,
	}
	if o.operations == 0 {
		return nil, errors.New("fio made no I/O: increase --duration")
	}
	for _, latency := range []fioLatency{job.Read.Latency, job.Write.Latency, job.Sync.Latency} {
		if len(latency.Percentile) > 0 {
			o.p50, o.p99 = latency.at("50"), latency.at("99")
		}
	}
	return o, nil
}
