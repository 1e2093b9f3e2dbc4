package kube

import (
	"context"
	"errors"
	"net/url"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// watched holds views of objects, which a watch updates. While the API server does not answer, they do
// not change.
type watched[T any] struct{ informer cache.SharedIndexInformer }

// kept is the part of an object that is kept in memory: the fields of its key, and the view.
type kept[T any] struct {
	metav1.ObjectMeta
	view T
}

// resource can be watched: dynamic.ResourceInterface, which lists whole objects, or
// metadata.ResourceInterface.
type resource[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// watchObjects watches objects until ctx ends. It raises changed when all are read and after each
// change.
func watchObjects[T any, L runtime.Object](ctx context.Context, what string, from resource[L], only metav1.ListOptions, see func(runtime.Object) (T, error), changed signal) watched[T] {
	informer := cache.NewSharedIndexInformerWithOptions(cache.ToListWatcherWithWatchListSemantics(listWatch(ctx, what, from, only), from), nil, cache.SharedIndexInformerOptions{ObjectDescription: what})
	// These fail only if the informer runs already.
	_ = informer.SetTransform(keep(see))
	_ = informer.SetWatchErrorHandlerWithContext(func(context.Context, *cache.Reflector, error) {}) // listWatch logs the error
	_, _ = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { changed.raise() },
		UpdateFunc: func(any, any) { changed.raise() },
		DeleteFunc: func(any) { changed.raise() },
	})
	go informer.RunWithContext(ctx)
	go func() {
		select {
		case <-ctx.Done():
		case <-informer.HasSyncedChecker().Done():
			changed.raise()
		}
	}()
	return watched[T]{informer}
}

// watchOne watches the object of a name, as RBAC rules with resourceNames require.
func watchOne[T any](ctx context.Context, c *Client, kind schema.GroupVersionResource, namespace, name string, changed signal) watched[T] {
	only := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", name).String()}
	return watchObjects(ctx, kind.Resource+"/"+name, c.watches.Resource(kind).Namespace(namespace), only, whole[T], changed)
}

// keep converts objects to kept. Informers call it again with its own results.
func keep[T any](see func(runtime.Object) (T, error)) cache.TransformFunc {
	return func(o any) (any, error) {
		object, ok := o.(runtime.Object)
		if !ok {
			return o, nil
		}
		v, err := see(object)
		if err != nil {
			return nil, err
		}
		m := object.(metav1.Object)
		return &kept[T]{metav1.ObjectMeta{Namespace: m.GetNamespace(), Name: m.GetName()}, v}, nil
	}
}

// listWatch logs each error once until another error or a success.
func listWatch[L runtime.Object](ctx context.Context, what string, from resource[L], only metav1.ListOptions) *cache.ListWatch {
	errs := errorLog{log: klog.FromContext(ctx), message: "Watching " + what + " failed; retrying"}
	narrow := func(o metav1.ListOptions) metav1.ListOptions {
		o.FieldSelector, o.LabelSelector = only.FieldSelector, only.LabelSelector
		return o
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			call, cancel := context.WithTimeout(ctx, callTimeout)
			defer cancel()
			list, err := from.List(call, narrow(o))
			errs.report(ctx, withoutURL(err))
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := from.Watch(ctx, narrow(o))
			if !listsInstead(err) {
				errs.report(ctx, withoutURL(err))
			}
			return w, err
		},
	}
}

// withoutURL removes the URL from an error: it contains a timeout, which differs each time.
func withoutURL(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}

// listsInstead reports whether the informer reacts to an error by a list: the resource version
// is too old, or the API server does not support WatchList.
func listsInstead(err error) bool {
	return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || apierrors.IsInvalid(err)
}

// whole converts a whole object to its view.
func whole[T any](o runtime.Object) (T, error) {
	return view[T](o.(*unstructured.Unstructured).Object)
}

func (w watched[T]) synced() bool { return w.informer.HasSynced() }

// all returns the views in no order.
func (w watched[T]) all() []T {
	var out []T
	for _, o := range w.informer.GetStore().List() {
		out = append(out, o.(*kept[T]).view)
	}
	return out
}

// one returns the object of a watch of one object.
func (w watched[T]) one() (object T, there bool) {
	for _, o := range w.all() {
		return o, true
	}
	return object, false
}
