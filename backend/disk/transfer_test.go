package disk_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

const mib = 1 << 20

// nodes are two nodes with some disks each. Those of the second have old data.
type nodes struct {
	*backendtest.Cluster
	disks [2][]string
}

// startNodes starts the nodes. sizes are those of the disks of each.
func startNodes(t *testing.T, bytesPerSecond string, sizes [2][]int64) *nodes {
	t.Helper()
	n := new(nodes)
	var configs []pool.Config
	for i := range sizes {
		for _, size := range sizes[i] {
			device, _, _ := testenv.Disk(t, size)
			n.disks[i] = append(n.disks[i], device)
			if i == 1 {
				backendtest.FillOld(t, device, size)
			}
		}
		configs = append(configs, pool.Config{Name: "default", Section: &disk.Disks{Match: n.disks[i]}})
	}
	n.Cluster = backendtest.StartClusterOn(t, configs, func(o *driver.Options) { o.Config.TransferLimit.BytesPerSecond = bytesPerSecond }, disk.Kind)
	return n
}

func (n *nodes) of(fsType string, class map[string]string) *backendtest.Transfers {
	return &backendtest.Transfers{Cluster: n.Cluster, Capability: backendtest.CapabilityOf(fsType), Class: class}
}

// awaitFree waits until the second node has a number of free disks.
func (n *nodes) awaitFree(t *testing.T, want int64) {
	t.Helper()
	backendtest.Eventually(t, func() error {
		resp, err := n.Nodes[1].Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
		if err == nil && resp.GetAvailableCapacity() < want {
			err = fmt.Errorf("the free disks have %d bytes, want %d", resp.GetAvailableCapacity(), want)
		}
		return err
	})
}

// TestTransfer: a disk that was received from another node has the content of its source, and nothing that the disk had before.
func TestTransfer(t *testing.T) {
	const size, larger = 322 * mib, 402 * mib
	n := startNodes(t, "", [2][]int64{{size}, {size, larger}})
	for _, tc := range []struct{ fsType, wipe string }{
		{"xfs", "discard"},
		{"btrfs", "zero"},
		{"", "discard"},
		{"", "zero"},
		{"", "none"}, // the last one, because a later source would show its data
	} {
		t.Run(cmp.Or(tc.fsType, "block")+"-"+tc.wipe, func(t *testing.T) {
			n.of(tc.fsType, map[string]string{"wipe": tc.wipe}).CheckUnused(t, "v", 320*mib, 400*mib)
			n.awaitFree(t, 720*mib)
			backendtest.FillOld(t, n.disks[1][0], size)
			backendtest.FillOld(t, n.disks[1][1], larger)
		})
	}
}

// TestTransferInterrupted: a transfer continues after a restart of either driver, and begins again on the same disk if the source was
// used meanwhile: the pool has no other disk. DeleteVolume wipes the received data. A disk that is too small is not used.
func TestTransferInterrupted(t *testing.T) {
	const size = 202 * mib
	n := startNodes(t, "64Mi", [2][]int64{{size}, {size - 10*mib, size}})
	tr := n.of("", nil)
	source := tr.Create(t, 0, "v", 200*mib, nil)
	source.Publish(t)
	content := make([]byte, 200*mib)
	_, _ = rand.Read(content[:80*mib])
	_, _ = rand.Read(content[150*mib:][:40*mib])
	source.Write(t, content, 0)
	source.Unpublish(t)
	begin := func(name string) {
		t.Helper()
		ctx, end := context.WithCancel(t.Context())
		defer end()
		answered := make(chan error, 1)
		go func() {
			_, err := tr.Router.Control.CreateVolume(ctx, tr.Request(1, name, 200*mib, source.Source()))
			answered <- err
		}()
		backendtest.Eventually(t, func() error {
			b, err := os.ReadFile(filepath.Join(n.records(), ".trivet/received", name, "progress.json"))
			if err == nil && bytes.Contains(b, []byte(`"verifiedBytes":0`)) {
				err = errors.New("nothing is verified yet")
			}
			return err
		})
		end()
		if err := <-answered; err == nil {
			t.Errorf("the call for %s has created a volume before it was ended", name)
		}
	}
	for _, tc := range []struct {
		name      string
		restarted int
		changed   bool
	}{{"sender", 0, false}, {"receiver", 1, false}, {"changed", 0, true}} {
		begin(tc.name)
		claimed := n.guid(t, ".trivet/received/"+tc.name)
		n.Nodes[tc.restarted].Restart(t)
		if tc.changed {
			content[0]++
			source.Publish(t)
			source.Write(t, content, 0)
			source.Unpublish(t)
		}
		backendtest.Eventually(t, func() error {
			_, err := tr.Router.Control.CreateVolume(t.Context(), tr.Request(1, tc.name, 200*mib, source.Source()))
			return err
		})
		v := tr.Create(t, 1, tc.name, 200*mib, source.Source())
		if got := n.guid(t, "volumes/"+tc.name); got != claimed {
			t.Errorf("%s: the disk was claimed again: got GUID %s, want %s", tc.name, got, claimed)
		}
		continued := regexp.MustCompile(`"Sending to another node".* volume="` + tc.name + `" from=[1-9]`).MatchString(backendtest.Log())
		if continued == tc.changed {
			t.Errorf("%s: the transfer was continued: %t", tc.name, continued)
		}
		v.Publish(t)
		if !bytes.Equal(v.Read(t, len(content)), content) {
			t.Errorf("%s: the volume differs from its source", tc.name)
		}
		v.Unpublish(t)
		v.Delete(t)
		n.awaitFree(t, 390*mib)
	}

	begin("cancelled")
	uuid, err := testenv.PoolUUID(n.records())
	must(t, err)
	backendtest.Eventually(t, func() error { // the transfer runs until then
		_, err := n.Nodes[1].Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "disk:default." + uuid[:8] + ":cancelled"})
		return err
	})
	n.awaitFree(t, 390*mib)
	got, err := os.ReadFile(n.disks[1][1])
	must(t, err)
	if len(bytes.Trim(got, "\x00")) > 0 {
		t.Error("the disk of a volume that was not received completely has data after the volume was deleted")
	}
	source.Delete(t)
}

// TestUnusedSource: a volume from a source that was never used is formatted with the mkfs options of its class.
func TestUnusedSource(t *testing.T) {
	const size = 322 * mib
	n := startNodes(t, "", [2][]int64{{size, size}, {size}})
	tr := n.of("xfs", map[string]string{"mkfsOptions": "-i size=1024"})
	source := tr.Create(t, 0, "v", 320*mib, nil)
	for node, name := range []string{"cloned", "sent"} {
		tr.Create(t, node, name, 320*mib, source.Source())
		b, err := os.ReadFile(filepath.Join(n.Nodes[node].Options.StateDir, "disks/default/volumes", name, "volume.json"))
		must(t, err)
		if !strings.Contains(string(b), `"size=1024"`) {
			t.Errorf("%s: got the record %s, want the mkfs options", name, b)
		}
	}
}

// records is the directory with the records of the second node.
func (n *nodes) records() string {
	return filepath.Join(n.Nodes[1].Options.StateDir, "disks", "default")
}

// guid returns the GUID in the mark of the disk of a volume of the second node, from the record in a folder.
func (n *nodes) guid(t *testing.T, folder string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(n.records(), folder, "volume.json"))
	must(t, err)
	found := regexp.MustCompile(`"guid": *"([^"]+)"`).FindSubmatch(b)
	if found == nil {
		t.Fatalf("got the record %s, want one with a GUID", b)
	}
	return string(found[1])
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
