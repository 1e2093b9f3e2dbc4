package crash

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// The kinds of rows for volume groups.
var (
	groupXFS = []kind{{targets.Volume("group", "xfs"), "group"}}
	groupRaw = []kind{{targets.Volume("group", "block"), "group-raw"}}
	inGroup  = slices.Concat(groupXFS, groupRaw)
)

// groupRows contains the rows for logical volumes, which run in a virtual machine.
var groupRows = slices.Concat(
	at(row{call: create, kinds: groupXFS}, crashpoint.CreateReserved, crashpoint.CreateBuilt, crashpoint.CreateCommitted, crashpoint.CreateDone),
	at(row{call: create, kinds: inGroup}, crashpoint.CreateImage),
	at(row{call: create, kinds: groupRaw}, crashpoint.CreateZeroed),
	at(row{call: stage, kinds: inGroup}, crashpoint.StageAttached, crashpoint.StageNoted, crashpoint.StageDone),
	at(row{call: stage, kinds: groupXFS}, crashpoint.StageFormatting, crashpoint.StageHalfFormat, crashpoint.StageFormatted, crashpoint.StageMarked, crashpoint.StageMounted),
	at(row{call: stage, kinds: inGroup, used: true}, crashpoint.StageAttached),
	at(row{call: publish, kinds: groupRaw, used: true, readOnly: true}, crashpoint.PublishReadOnly),
	at(row{call: expand, kinds: groupRaw}, crashpoint.GrowZeroed, crashpoint.GrowFreed),
	at(row{call: expand, kinds: inGroup}, crashpoint.GrowImage),
	at(row{call: expand, kinds: groupXFS}, crashpoint.GrowRecord),
	at(row{call: nodeExpand, kinds: inGroup}, crashpoint.GrowDevice),
	at(row{call: unpublish, kinds: groupRaw, readOnly: true}, crashpoint.UnpublishTarget),
	at(row{call: unstage, kinds: inGroup}, crashpoint.UnstageMount, crashpoint.UnstageGone),
	at(row{call: remove, kinds: inGroup}, crashpoint.DeleteRenamed),
	at(row{call: remove, kinds: groupXFS}, crashpoint.ReapZeroed, crashpoint.ReapErasing, crashpoint.ReapStarted),
)

// newGroupHost starts a driver with a pool of a new volume group.
func newGroupHost(t *testing.T, k kind) *host {
	t.Helper()
	return newHostWithGroup(t, k, k.Target().Medium(t, backendtest.Room{}).Config.Section.(*lvm.Group))
}

// newHostWithGroup starts a driver with a pool of an existing volume group.
func newHostWithGroup(t *testing.T, k kind, group *lvm.Group) *host {
	t.Helper()
	h := &host{binary: crashing, dir: newDir(t), class: map[string]string{"backend": k.Backend()}, size: k.Size()}
	h.pool = h.path("state/lvm/default")
	h.group = group
	h.begin(t, fmt.Sprintf("lvm: {volumeGroup: %q, thinPool: %q}", group.VolumeGroup, group.ThinPool), "")
	return h
}

// checkDevice compares the mounts and the device node of a disk or a logical volume with the expected state.
func (c *co) checkDevice() error {
	node := c.host.deviceNode(c.name)
	_, statErr := os.Stat(node)
	errs := []error{c.checkTargetExists()}
	if exists := statErr == nil; exists != c.staged {
		errs = append(errs, fmt.Errorf("got device node %s exists: %t, want %t", node, exists, c.staged))
	}
	if c.staged && c.kind.Has(backendtest.Encrypted) {
		var err error
		node, err = c.mappedNode()
		errs = append(errs, err)
	}
	if !c.kind.Block() {
		errs = append(errs, c.checkMount(c.staging(), node, c.staged, false), c.checkMount(c.target(), node, c.published, c.readOnly))
	} else if c.published {
		errs = append(errs, c.checkNode(node))
	}
	if c.staged && c.resized && !c.kind.Block() {
		errs = append(errs, c.checkDeviceSize(node))
	}
	return errors.Join(errs...)
}
