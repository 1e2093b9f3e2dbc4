//go:build vm

package volumemanager

import (
	"fmt"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/lvm"
)

// TestGroups is TestBackends for logical volumes, and for encrypted images and logical volumes. It also kills and restarts
// the manager while the volumes are in use.
func TestGroups(t *testing.T) {
	thick := backendtest.OnGroup(t, backendtest.Room{}).Config.Section.(*lvm.Group)
	thin := backendtest.OnThinPool(t, backendtest.Room{}).Config.Section.(*lvm.Group)
	m := newMachineWithDriver(t, fmt.Sprintf("{name: thick, lvm: {volumeGroup: %s}}", thick.VolumeGroup),
		fmt.Sprintf("{name: thin, lvm: {volumeGroup: %s, thinPool: %s}}", thin.VolumeGroup, thin.ThinPool))
	manifests := []string{trivet + passphraseSecret}
	var all []kind
	for _, one := range []struct {
		class, parameters string
		noCopies          bool
	}{
		{"thick", "backend: lvm, pool: thick", true},
		{"thin", "backend: lvm, pool: thin", false},
		{"thick-crypt", "backend: lvm, pool: thick" + encrypted, true},
		{"thin-crypt", "backend: lvm, pool: thin" + encrypted, false},
		{"image-crypt", "backend: loop" + encrypted, false},
	} {
		for _, fsType := range []string{"ext4", "xfs"} {
			name := one.class + "-" + fsType
			manifests = append(manifests, class(name, one.parameters+", csi.storage.k8s.io/fstype: "+fsType))
			all = append(all, kind{name: name, class: name, size: "320Mi", larger: "640Mi", noCopies: one.noCopies})
		}
		all = append(all, kind{name: one.class + "-device", class: one.class + "-ext4", size: "16Mi", larger: "32Mi", more: ", volumeMode: Block", noCopies: one.noCopies})
	}
	m.put("classes", manifests...)
	first := m.fill(all)
	m.killManager("first")
	m.grow(all, first)
	m.copies(all)
	m.deleteSnapshots()
	m.removeAll()
	must(t, m.checkPool(0))
	for _, group := range []*lvm.Group{thick, thin} {
		eventually(t, func() error { return backendtest.CheckOnlyRecords(group) })
	}
}

// TestEncryptedDisks is TestDisks for encrypted volumes.
func TestEncryptedDisks(t *testing.T) { testDisks(t, encrypted) }
