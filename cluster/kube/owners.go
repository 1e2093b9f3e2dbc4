package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"k8s.io/klog/v2"
)

// PoolOwnersOptions names the ConfigMap that records the owners of pools.
type PoolOwnersOptions struct {
	// Namespace is the installation's, Name is the ConfigMap's.
	Namespace, Name string
}

// PoolOwners records in a ConfigMap which node owns which pool. The controller creates the
// ConfigMap and adds entries. It never changes or removes an entry: only an administrator does.
// Several replicas may add entries at once. While the API server does not answer, Known returns
// what was read last, and nothing is added.
type PoolOwners struct {
	PoolOwnersOptions
	changed signal

	mu     sync.Mutex
	client *Client
	object *watched[configMap] // nil until Run has connected
}

// NewPoolOwners returns an empty record. Run fills it from the ConfigMap.
func NewPoolOwners(o PoolOwnersOptions) *PoolOwners {
	return &PoolOwners{PoolOwnersOptions: o, changed: newSignal()}
}

// Run watches the ConfigMap until ctx ends.
func (o *PoolOwners) Run(ctx context.Context, connect func() (*Client, error)) {
	c := dial(ctx, connect)
	if c == nil {
		return
	}
	object := watchObjects(ctx, "configmaps/"+o.Name, c.watches.Resource(configMaps).Namespace(o.Namespace), named(o.Name), whole[configMap], o.changed)
	o.mu.Lock()
	o.client, o.object = c, &object
	o.mu.Unlock()
	o.changed.raise()
	<-ctx.Done()
}

// Known returns the node of each recorded pool. The caller must not change the map.
func (o *PoolOwners) Known() map[string]string {
	known, _ := o.read()
	return known.Data
}

// read returns the ConfigMap as last read. synced is false before the first read.
func (o *PoolOwners) read() (known configMap, synced bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.object == nil || !o.object.synced() {
		return known, false
	}
	known, _ = o.object.one()
	return known, true
}

// Record adds entries for pools that have none, and returns when Known contains them. It must
// not be called concurrently.
func (o *PoolOwners) Record(ctx context.Context, owners map[string]string) error {
	for {
		known, synced := o.read()
		missing := map[string]any{}
		for pool, node := range owners {
			if known.Data[pool] == "" {
				missing[pool] = node
			}
		}
		if synced && len(missing) == 0 {
			return nil
		}
		if synced {
			if err := o.add(ctx, known, missing); err != nil && !lostRace(err) {
				return fmt.Errorf("configmaps/%s: %w", o.Name, err)
			}
		}
		select { // the watch reports what was written
		case <-ctx.Done():
			return fmt.Errorf("configmaps/%s: %w: check that the API server is reachable", o.Name, ctx.Err())
		case <-o.changed:
		}
	}
}

// add writes entries if the ConfigMap has not changed since it was read.
func (o *PoolOwners) add(ctx context.Context, known configMap, entries map[string]any) error {
	in := o.client.api.Resource(configMaps).Namespace(o.Namespace)
	var err error
	if known.Metadata.Name == "" {
		err = create(ctx, in, "v1", "ConfigMap", map[string]any{"metadata": map[string]any{"name": o.Name}, "data": entries})
	} else {
		_, err = patch[configMap](ctx, in, known.Metadata, map[string]any{"data": entries})
	}
	if err == nil {
		klog.FromContext(ctx).Info("Recorded the owners of pools", "configMap", o.Name, "pools", len(entries))
	}
	return err
}

// MoveCommand returns the command with which an administrator changes the owner of a pool.
func (o *PoolOwners) MoveCommand(pool, node string) string {
	data, _ := json.Marshal(map[string]any{"data": map[string]string{pool: node}}) // strings can always be encoded
	return fmt.Sprintf("kubectl -n %s patch configmap %s --type=merge -p '%s'", o.Namespace, o.Name, data)
}
