//go:build vm

package flexvolume_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
	"github.com/trivet-csi/trivet/linux/mount"
)

// TestNFS mounts NFS directories with the options that the usual FlexVolume driver for NFS has.
func TestNFS(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{})
	export := s.Export(t, "tank")
	k := newKubelet(t, t.TempDir())
	of := func(extra ...string) string {
		return options(append([]string{"server", s.Address(), "share", export}, extra...)...)
	}
	t.Run("lifecycle", func(t *testing.T) { k.on(t).nfsLifecycle(of, s.Dir(export)) })
	t.Run("outage", func(t *testing.T) { k.on(t).nfsOutage(of, s.Link()) })
}

// nfsLifecycle: several pods mount and use one directory.
func (k *kubelet) nfsLifecycle(of func(extra ...string) string, dir string) {
	web, db, reader := k.target("web"), k.target("db"), k.target("reader")
	k.succeed("nfs", "mount", web, of())
	k.succeed("nfs", "mount", db, of())
	k.succeed("nfs", "mount", reader, of("kubernetes.io/readwrite", "ro", "mountOptions", "nfsvers=4.2,soft"))
	k.write(filepath.Join(web, "file"), "kept")
	k.read(filepath.Join(db, "file"), "kept")
	k.read(filepath.Join(reader, "file"), "kept")
	k.read(filepath.Join(dir, "file"), "kept")
	if os.WriteFile(filepath.Join(reader, "file"), nil, 0o600) == nil {
		k.t.Error("writing to a read-only mount succeeded")
	}
	for _, at := range []string{web, db, reader} {
		if e, err := mount.OnPath(at); err != nil || e == nil || !mount.IsNFS(e) {
			k.t.Errorf("%s: got mount %v, error %v, want an NFS mount", at, e, err)
		}
		k.succeed("nfs", "unmount", at)
	}
	k.checkNothingLeft()
	k.refuse("no such file or directory", "nfs", "mount", k.target("web"), strings.Replace(of(), `"share":"/tank"`, `"share":"/missing"`, 1))
	k.refuse("has no size of its own", "nfs", "expandvolume", of(), "", "1", "1")
}

// nfsOutage: while the server does not answer, mount and unmount fail. When the outage time has passed, unmount
// succeeds by force.
func (k *kubelet) nfsOutage(of func(extra ...string) string, link *nfsd.Link) {
	web := k.target("web")
	k.succeed("nfs", "mount", web, of())
	link.Cut(k.t)
	a := k.call("nfs", "mount", k.target("db"), of("mountOptions", "nfsvers=4.1"))
	if a.Status != "Failure" || a.Message == "" {
		k.t.Errorf("mount without an answer of the server: got %+v, want a failure with a message", a)
	}
	k.t.Log(a.Message)
	link.Restore(k.t)
	k.succeed("nfs", "unmount", web)
	k.succeed("nfs", "init")
	k.checkNothingLeft()

	web = k.target("web")
	k.succeed("nfs", "mount", web, of())
	link.CutWriting(k.t, filepath.Join(web, "dirty"))
	for range 2 {
		k.refuse("the volume stays mounted, and is unmounted by force in", "nfs", "unmount", web)
		if e, err := mount.OnPath(web); err != nil || e == nil {
			k.t.Fatalf("after a failed unmount: got mount %v, error %v, want the volume mounted", e, err)
		}
	}
	k.ageOutage()
	k.succeed("nfs", "unmount", web)
	k.checkNothingLeft()
	link.Restore(k.t)
	web = k.target("web")
	k.succeed("nfs", "mount", web, of())
	k.read(filepath.Join(web, "file"), "kept")
	k.succeed("nfs", "unmount", web)
}

// ageOutage changes the only record: the start of the outage becomes one hour earlier.
func (k *kubelet) ageOutage() {
	k.t.Helper()
	records, err := filepath.Glob(filepath.Join(k.state, "targets", "*.json"))
	if err != nil || len(records) != 1 {
		k.t.Fatalf("got the records %q, error %v, want one", records, err)
	}
	b, err := os.ReadFile(records[0])
	must(k.t, err)
	var record map[string]any
	must(k.t, json.Unmarshal(b, &record))
	since, ok := record["silentSinceUptimeSeconds"].(float64)
	if !ok {
		k.t.Fatalf("got record %s, want one with silentSinceUptimeSeconds", b)
	}
	record["silentSinceUptimeSeconds"] = since - 3600
	b, err = json.Marshal(record)
	must(k.t, err)
	must(k.t, os.WriteFile(records[0], b, 0o600))
}
