package main_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/confine"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestConfinedDriver: no thread of the driver, and no program that it starts, has capabilities that the driver does not
// need, or can make all system calls.
func TestConfinedDriver(t *testing.T) {
	testenv.RequireRoot(t)
	bin, statuses := t.TempDir(), filepath.Join(t.TempDir(), "statuses")
	script := "#!/bin/sh\ncat /proc/$PPID/task/*/status /proc/self/status >" + statuses + "\nexit 1\n"
	must(t, os.WriteFile(filepath.Join(bin, "mkfs.xfs"), []byte(script), 0o755))
	p := start(t, bin+":"+os.Getenv("PATH"))
	c := mountCapability("xfs")
	v, err := p.ctrl.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "v", VolumeCapabilities: []*csi.VolumeCapability{c}})
	must(t, err)
	if _, err := p.node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: v.GetVolume().GetVolumeId(), StagingTargetPath: t.TempDir(), VolumeCapability: c,
	}); err == nil {
		t.Error("NodeStageVolume succeeded with a mkfs.xfs that fails")
	}
	own, err := os.ReadFile("/proc/self/status")
	must(t, err)
	all, err := strconv.ParseUint(statusValues(own, "CapBnd")[0], 16, 64)
	must(t, err)
	var needed uint64
	for _, capability := range confine.Needed {
		needed |= 1 << capability.Number
	}
	kept := fmt.Sprintf("%016x", all&needed)
	got, err := os.ReadFile(statuses)
	must(t, err)
	for field, want := range map[string]string{"CapPrm": kept, "CapEff": kept, "CapBnd": kept, "NoNewPrivs": "1", "Seccomp": "2"} {
		values := statusValues(got, field)
		if len(values) < 3 {
			t.Errorf("%s: got %d values, want those of the driver's threads and of mkfs.xfs", field, len(values))
		}
		for _, value := range values {
			if value != want {
				t.Errorf("%s: got %s, want %s", field, value, want)
			}
		}
	}
	if name := statusValues(got, "Name")[0]; name != filepath.Base(program) {
		t.Errorf("got the name %s of the driver's process, want that of the program", name)
	}
	log, err := os.ReadFile(p.log)
	must(t, err)
	if !regexp.MustCompile(`"Confined the driver" capabilities=\["SYS_ADMIN".*\] capabilitiesDropped=true callsRefused=true`).Match(log) {
		t.Errorf("the log does not contain the restrictions of the driver:\n%s", log)
	}
}

// TestNotConfined: a driver that cannot confine itself serves, and logs what failed and what did not.
func TestNotConfined(t *testing.T) {
	testenv.RequireRoot(t)
	for _, row := range []struct {
		name   string
		call   uint32
		errno  syscall.Errno
		logged string
	}{
		{"kernel without seccomp", unix.SYS_SECCOMP, unix.ENOSYS, `err="seccomp: function not implemented" capabilities=\["SYS_ADMIN".*\] capabilitiesDropped=true callsRefused=false`},
		{"capset forbidden", unix.SYS_CAPSET, unix.EPERM, `err="capset: operation not permitted" capabilities=\["SYS_ADMIN".*\] capabilitiesDropped=false callsRefused=true`},
	} {
		t.Run(row.name, func(t *testing.T) {
			state := testenv.Filesystem(t, "xfs", "2G") + "/state"
			var p *process
			testenv.Forbid(t, row.errno, []uint32{row.call}, func() { p = startWith(t, os.Getenv("PATH"), "", state) })
			if p == nil {
				t.Fatal("the driver does not serve")
			}
			log, err := os.ReadFile(p.log)
			must(t, err)
			if !regexp.MustCompile(`"The driver has more privileges than it needs" ` + row.logged + ` advice="`).Match(log) {
				t.Errorf("the log does not contain the error:\n%s", log)
			}
		})
	}
}

// TestConfigPipe: a driver that executes itself reads its configuration only once.
func TestConfigPipe(t *testing.T) {
	testenv.RequireRoot(t)
	pipe := filepath.Join(t.TempDir(), "config")
	must(t, unix.Mkfifo(pipe, 0o600))
	state := testenv.Filesystem(t, "xfs", "2G") + "/state"
	written := make(chan error, 1)
	go func() {
		written <- os.WriteFile(pipe, []byte("pools:\n- {name: piped, directory: {path: "+state+"/piped}}\n"), 0o600)
	}()
	p := startWith(t, os.Getenv("PATH"), pipe, state)
	must(t, <-written)
	v, err := p.ctrl.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "v", Parameters: map[string]string{"pool": "piped"}, VolumeCapabilities: []*csi.VolumeCapability{mountCapability("xfs")},
	})
	must(t, err)
	if _, err := p.ctrl.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.GetVolume().GetVolumeId()}); err != nil {
		t.Error(err)
	}
}

// statusValues returns the values of a field in statuses of threads (proc_pid_status(5)).
func statusValues(statuses []byte, field string) (all []string) {
	for line := range strings.Lines(string(statuses)) {
		if value, ok := strings.CutPrefix(line, field+":\t"); ok {
			all = append(all, strings.TrimSpace(value))
		}
	}
	return all
}
