package flexvolume

import (
	"context"

	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// A pod's own flexVolume and a PersistentVolume reach the executable with the same options,
// and a pod's author chooses the name of the volume in the pod: the two cannot be told
// apart. So every volume of a pool belongs to one namespace. A kubelet adds the pod's
// namespace to a call to mount, and the API server lets no manifest set that option.

// claim gives a volume that belongs to no namespace to the pod's, and refuses the volume
// to the pods of all other namespaces. A volume that is mounted and belongs to no namespace
// was mounted by a version that recorded none: its namespace is unknown.
func (s *turn) claim(ctx context.Context, o options) error {
	return s.withRecord(ctx, o, func(p *pool.Pool, v volume.Volume) error {
		if v.Namespace == o.namespace {
			return nil
		}
		at, err := mount.OnPath(s.staging(v.ID.String()))
		switch {
		case err != nil:
			return err
		case v.Namespace == "" && at != nil:
			return volume.Errorf(volume.ErrPrecondition, "volume %s is mounted and has no namespace on record: have an administrator give it to the namespace of its pods with the call assign, or delete these pods first", v.ID)
		case v.Namespace == "":
			return p.SetNamespace(v, o.namespace)
		}
		return volume.Errorf(volume.ErrPrecondition, "volume %s belongs to namespace %q, and the pod is in namespace %q: use another volume, or have an administrator give it to that namespace with the call assign", v.ID, v.Namespace, o.namespace)
	})
}

// assign gives a volume that is not mounted to a namespace, whichever it belonged to. A
// volume that belongs to none may be mounted.
func (s *turn) assign(ctx context.Context, o options, namespace string) error {
	if o.share != nil {
		return volume.Errorf(volume.ErrInvalid, "a directory of a server belongs to no namespace: the server decides who may mount it")
	}
	return s.withRecord(ctx, o, func(p *pool.Pool, v volume.Volume) error {
		at, err := mount.OnPath(s.staging(v.ID.String()))
		switch {
		case err != nil:
			return err
		case at != nil && v.Namespace != "":
			return volume.Errorf(volume.ErrInUse, "volume %s is mounted for pods of namespace %q: delete them first", v.ID, v.Namespace)
		}
		return p.SetNamespace(v, namespace)
	})
}

// withRecord reads the record of a volume of this node, which no other process changes
// meanwhile.
func (s *turn) withRecord(ctx context.Context, o options, do func(p *pool.Pool, v volume.Volume) error) error {
	id, err := s.find(ctx, o)
	if err != nil {
		return err
	}
	p, err := s.pools.Named(o.pool)
	if err != nil {
		return err
	}
	folder, err := p.LockVolume(ctx, id.Name)
	if err != nil {
		return err
	}
	defer folder.Close()
	v, err := p.ByID(id)
	if err != nil {
		return err
	}
	return do(p, v)
}
