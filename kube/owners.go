package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"k8s.io/klog/v2"
)

// PoolOwnersOptions say where it is recorded which node has which pool.
type PoolOwnersOptions struct {
	// Namespace is that of the installation, Name that of the ConfigMap.
	Namespace, Name string
}

// PoolOwners records in a ConfigMap which node has which pool. The controller makes the
// ConfigMap, and adds entries. It changes and removes none: that is an administrator's
// right. Several replicas may add entries at once. While the API server is away what was
// read last stays known, and nothing is added.
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

// Run follows the ConfigMap until ctx ends.
func (o *PoolOwners) Run(ctx context.Context, connect func() (*Client, error)) {
	c := dial(ctx, connect)
	if c == nil {
		return
	}
	object := follow(ctx, "configmaps/"+o.Name, c.watches.Resource(configMaps).Namespace(o.Namespace), named(o.Name), whole[configMap], o.changed)
	o.mu.Lock()
	o.client, o.object = c, &object
	o.mu.Unlock()
	o.changed.raise()
	<-ctx.Done()
}

// Known are the names of nodes by pool. The caller does not change the map.
func (o *PoolOwners) Known() map[string]string {
	known, _ := o.read()
	return known.Data
}

// read returns the ConfigMap as last seen. synced is false until it was read once.
func (o *PoolOwners) read() (known configMap, synced bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.object == nil || !o.object.synced() {
		return known, false
	}
	known, _ = o.object.one()
	return known, true
}

// Record adds entries for pools that have none, and returns when Known has them. One
// caller at a time.
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
			if err := o.add(ctx, known, missing); err != nil && !overtaken(err) {
				return fmt.Errorf("configmaps/%s: %w", o.Name, err)
			}
		}
		select { // what was written comes by the watch
		case <-ctx.Done():
			return fmt.Errorf("configmaps/%s: %w: is the API server reachable?", o.Name, ctx.Err())
		case <-o.changed:
		}
	}
}

// add writes entries, if the ConfigMap still is what is known.
func (o *PoolOwners) add(ctx context.Context, known configMap, entries map[string]any) error {
	in := o.client.api.Resource(configMaps).Namespace(o.Namespace)
	var err error
	if known.Metadata.Name == "" {
		err = create(ctx, in, "v1", "ConfigMap", map[string]any{"metadata": map[string]any{"name": o.Name}, "data": entries})
	} else {
		_, err = patch[configMap](ctx, in, known.Metadata, map[string]any{"data": entries})
	}
	if err == nil {
		klog.FromContext(ctx).Info("Recorded which nodes have pools", "configMap", o.Name, "pools", len(entries))
	}
	return err
}

// MoveCommand is what an administrator runs to give a pool to another node.
func (o *PoolOwners) MoveCommand(pool, node string) string {
	data, _ := json.Marshal(map[string]any{"data": map[string]string{pool: node}}) // strings always can
	return fmt.Sprintf("kubectl -n %s patch configmap %s --type=merge -p '%s'", o.Namespace, o.Name, data)
}
