//go:build vm

package lvm_test

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"regexp"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// onOldGroup is backendtest.OnGroup, with old data in the extents that are allocated first.
func onOldGroup(t testing.TB, room backendtest.Room) backendtest.Medium {
	t.Helper()
	const size = 2048 * mib
	m := backendtest.OnGroup(t, room)
	group := m.Config.Section.(*lvm.Group).VolumeGroup
	testenv.Run(t, "lvm", "lvcreate", "--yes", "--wipesignatures", "n", "--size", fmt.Sprintf("%db", size), "--name", "old", group)
	backendtest.FillOld(t, "/dev/"+group+"/old", size)
	testenv.Run(t, "lvm", "lvremove", "--yes", group+"/old")
	return m
}

// TestThickTransfer: a thick volume that was received has the content of its source, and nothing that its extents had before.
func TestThickTransfer(t *testing.T) {
	n := startNodesOn(t, "", onOldGroup, onOldGroup)
	for _, encryption := range []string{"none", "luks2"} {
		for _, fsType := range []string{"ext4", "xfs", ""} {
			t.Run(encryption+"-"+cmp.Or(fsType, "block"), func(t *testing.T) {
				n.of(fsType, encryption).CheckUnused(t, "v-"+encryption+fsType, 320*mib, 400*mib)
			})
		}
	}
	n.wantNothingLeft(t)
}

// TestThickTransferInterrupted: a transfer of a snapshot of a thin pool to a thick volume continues after a restart of either driver.
// DeleteVolume wipes what was received.
func TestThickTransferInterrupted(t *testing.T) {
	n := startNodesOn(t, "48Mi", backendtest.OnThinPool, onOldGroup)
	tr := n.of("", "none")
	source, content, snapshot := n.cancelled(t, tr)
	if found := n.contains(t, content[:4096]); found {
		t.Error("the extents of a volume that was deleted while it was received have its data")
	}

	for _, restarted := range []int{0, 1} {
		name := fmt.Sprintf("interrupted-%d", restarted)
		n.beginUnattended(t, tr, name, snapshot)
		n.Nodes[restarted].Stop(t)
		if restarted == 1 {
			n.makeStale(t, name, 200*mib)
		}
		n.Nodes[restarted].Restart(t)
		v := n.complete(t, tr, name, snapshot)
		if !n.isCopy(v) {
			t.Errorf("after the restart of node %d: the volume is not marked as a copy", restarted)
		}
		if !regexp.MustCompile(`"Sending to another node".* volume="` + name + `" from=[1-9]`).MatchString(backendtest.Log()) {
			t.Errorf("after the restart of node %d: the whole content was sent again", restarted)
		}
		v.Publish(t)
		if !bytes.Equal(v.Read(t, len(content)), content) {
			t.Errorf("after the restart of node %d: the volume differs from its source", restarted)
		}
		if n.isCopy(v) {
			t.Errorf("after the restart of node %d: the staged volume is marked as a copy", restarted)
		}
		v.Unpublish(t)
		v.Delete(t)
	}
	tr.DeleteSnapshot(t, snapshot)
	source.Delete(t)
	n.wantNothingLeft(t)
}

// contains reports whether the free extents of the second node contain a block.
func (n *nodes) contains(t *testing.T, block []byte) bool {
	t.Helper()
	group := n.groups[1].VolumeGroup
	testenv.Run(t, "lvm", "lvcreate", "--yes", "--wipesignatures", "n", "--zero", "n", "--size", "2g", "--name", "free", group)
	defer testenv.Run(t, "lvm", "lvremove", "--yes", group+"/free")
	f, err := os.Open("/dev/" + group + "/free")
	must(t, err)
	defer f.Close()
	b := make([]byte, mib)
	for at := int64(0); at < 2048*mib; at += mib {
		_, err := f.ReadAt(b, at)
		must(t, err)
		if bytes.Contains(b, block) {
			return true
		}
	}
	return false
}
