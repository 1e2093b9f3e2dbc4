package crash

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// newGroupHost starts an armed driver with a pool of a new volume group.
func newGroupHost(t *testing.T, k kind, armed crashpoint.Point) *host {
	t.Helper()
	h := &host{binary: crashing, dir: t.TempDir(), class: map[string]string{"backend": k.Backend()}, size: k.Size()}
	h.pool = h.path("state/lvm/default")
	h.group = k.Target().Medium(t, backendtest.Room{}).Config.Section.(*lvm.Group).VolumeGroup
	h.begin(t, fmt.Sprintf("lvm: {volumeGroup: %q}", h.group), armed)
	return h
}

// checkLogical compares the mounts and the device node of a logical volume with the expected state.
func (c *co) checkLogical() error {
	node := c.host.deviceNode(c.name)
	_, statErr := os.Stat(node)
	errs := []error{c.checkTargetExists()}
	if exists := statErr == nil; exists != c.staged {
		errs = append(errs, fmt.Errorf("got device node %s exists: %t, want %t", node, exists, c.staged))
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

// wantOnlyRecords fails if the volume group has a logical volume other than that of the records.
func (h *host) wantOnlyRecords() error {
	out, err := exec.Command("lvm", "lvs", "--noheadings", "-o", "lv_name", h.group).Output()
	if names := strings.Fields(string(out)); err == nil && (len(names) != 1 || !strings.HasPrefix(names[0], "trivet.records.")) {
		err = fmt.Errorf("got logical volumes %q, want only that of the records", names)
	}
	return err
}
