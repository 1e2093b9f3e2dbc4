package emptydir

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/linux/tree"
	"github.com/trivet-csi/trivet/volumemanager/ownership"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// noLimit is the limit, in bytes, of a directory whose sizeLimit was removed from the manifest.
const noLimit = 1 << 60

// setUpDisk creates the directory, or updates the limit of a directory that has a record. It first removes
// a directory without a record, which an interrupted call left and no pod has used.
func (m *mounter) setUpDisk(ctx context.Context, rec *record, args plugins.MounterArgs) error {
	if err := m.makeParent(); err != nil {
		return err
	}
	_, err := os.Lstat(m.path)
	switch {
	case err == nil && rec != nil:
		return m.updateLimit(rec)
	case err == nil:
		err = m.removeIncomplete(ctx)
	case errors.Is(err, fs.ErrNotExist):
		err = m.p.forget(m.key)
	}
	if err != nil {
		return err
	}
	m.p.sweep()
	return m.create(ctx, args)
}

// removeIncomplete removes the empty directory of an interrupted call. A directory that is not empty
// does not belong to the volume.
func (m *mounter) removeIncomplete(ctx context.Context) error {
	entries, err := os.ReadDir(m.path)
	if err != nil {
		return err
	}
	if len(entries) > 0 {
		return fmt.Errorf("%s is not empty, and no record shows that it belongs to the pod: move it away", m.path)
	}
	return m.removeDisk(ctx)
}

// create creates the directory first and its record last.
func (m *mounter) create(ctx context.Context, args plugins.MounterArgs) error {
	rec := &record{}
	err := m.p.withQuota(func(fs *quota.FS) error {
		parent, err := os.Open(filepath.Dir(m.path))
		if err != nil {
			return err
		}
		defer parent.Close()
		if err := fs.MakeDir(parent, filepath.Base(m.path)); err != nil {
			return err
		}
		if m.size == 0 {
			return nil
		}
		rec, err = m.allocate(fs)
		return err
	})
	if err != nil {
		return err
	}
	if err := os.Chmod(m.path, mode); err != nil {
		return err
	}
	if err := ownership.Set(ctx, m.path, args); err != nil {
		return err
	}
	return m.p.save(m.key, rec)
}

// allocate limits the size of the directory if the filesystem supports quotas, and returns the record of
// the limit.
func (m *mounter) allocate(fs *quota.FS) (*record, error) {
	if fs.Kind() == quota.None {
		m.warn(fs.Why())
		return &record{}, nil
	}
	m.p.recording.Lock()
	defer m.p.recording.Unlock()
	taken, err := m.p.ids()
	if err != nil {
		return nil, err
	}
	dir, err := os.Open(m.path)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	id, err := fs.Allocate(dir, quota.Limit{Bytes: m.size}, func(id uint64) bool { return taken[id] })
	if err != nil {
		return nil, fmt.Errorf("sizeLimit %s: %w", m.limit, err)
	}
	return &record{Kind: fs.Kind(), ID: id, Bytes: m.size}, nil
}

// warn adds a warning that the size limit is not enforced.
func (m *mounter) warn(why string) {
	m.warnings = append(m.warnings, fmt.Sprintf("emptyDir.sizeLimit %s is not enforced: %s", m.limit, why))
}

// updateLimit changes the limit of a directory to the limit in the manifest.
func (m *mounter) updateLimit(rec *record) error {
	if rec.ID == 0 && m.size == 0 {
		return nil
	}
	return m.p.withQuota(func(fs *quota.FS) error {
		why, err := m.whyUnlimited(fs, rec)
		if err != nil || why != "" {
			if why != "" && m.size != 0 {
				m.warn(why)
			}
			return err
		}
		limit := quota.Limit{Bytes: m.size}
		if limit.Bytes == 0 {
			limit.Bytes = noLimit
		}
		if limit.Bytes == rec.Bytes {
			return nil
		}
		if err := fs.Set(rec.ID, limit); err != nil {
			return err
		}
		rec.Bytes = limit.Bytes
		return m.p.save(m.key, rec)
	})
}

// whyUnlimited returns the reason why a limit of the directory is not enforced; empty if it is
// enforced.
func (m *mounter) whyUnlimited(fs *quota.FS, rec *record) (why string, err error) {
	switch {
	case fs.Kind() == quota.None:
		return fs.Why(), nil
	case rec.ID == 0:
		return "the volume was created while directories could not be limited: recreate the pod", nil
	case rec.Kind != fs.Kind():
		return fmt.Sprintf("the volume's limit is a %s, and the filesystem now has %s: recreate the pod", rec.Kind, fs.Kind()), nil
	}
	dir, err := os.Open(m.path)
	if err != nil {
		return "", err
	}
	defer dir.Close()
	has, err := fs.Has(dir, rec.ID)
	if err == nil && !has {
		why = "the directory was replaced by a copy, or a process in the pod has removed its limit: recreate the pod"
	}
	return why, err
}

// releaseTimeout limits the wait for the release of a quota ID that has no record. An ID that is still
// busy after the timeout is never released.
const releaseTimeout = 10 * time.Second

// removeDisk removes the directory and its record, and releases its quota ID. The temporary file of a killed
// writer of the record is removed first: once the directory is removed, only a record leads to another call.
func (v *volume) removeDisk(ctx context.Context) error {
	if err := mount.RemoveTarget(filepath.Join(v.p.records(), v.key+suffix+atomicfile.Temporary)); err != nil {
		return err
	}
	parent, err := os.Open(filepath.Dir(v.path))
	if err == nil {
		defer parent.Close()
		err = v.p.withQuota(func(fs *quota.FS) error { return v.removeDir(ctx, fs, parent) })
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := v.p.forget(v.key); err != nil {
		return err
	}
	v.p.sweep()
	return nil
}

// removeDir removes the directory with its content. It ensures that the quota ID of a directory without a
// record is released.
func (v *volume) removeDir(ctx context.Context, fs *quota.FS, parent *os.File) error {
	name := filepath.Base(v.path)
	info, err := os.Lstat(v.path)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return tree.Remove(ctx, parent, name)
	}
	unrecorded, err := v.recordID(fs)
	if err != nil {
		return err
	}
	done, err := fs.RemoveDir(parent, name)
	if err == nil && !done {
		err = tree.Remove(ctx, parent, name)
	}
	if err != nil || unrecorded == 0 {
		return err
	}
	return retry.For(ctx, releaseTimeout, func() (bool, error) {
		err := fs.Release(unrecorded)
		return errors.Is(err, quota.ErrBusy), err
	})
}

// recordID writes a record for a directory without one, which an interrupted call left, so that its
// quota ID can be released after the directory is removed. If the disk is full, it returns the ID
// instead, because a full disk must not prevent the removal of a pod.
func (v *volume) recordID(fs *quota.FS) (unrecorded uint64, err error) {
	if r, err := v.p.load(v.key); err != nil || r != nil {
		return 0, err
	}
	dir, err := os.Open(v.path)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	id, err := fs.ID(dir)
	if err != nil || id == 0 {
		return 0, err
	}
	err = v.p.save(v.key, &record{Kind: fs.Kind(), ID: id})
	if errors.Is(err, syscall.ENOSPC) {
		return id, nil
	}
	return 0, err
}
