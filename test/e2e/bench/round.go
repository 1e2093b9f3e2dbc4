package main

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const (
	image = "registry.k8s.io/pause:3.10.2"
	// timeout is the maximum duration of each of the two parts of a round.
	timeout = 5 * time.Minute
)

// round contains the durations of a round.
type round struct {
	pods     int
	up, down time.Duration // until all pods are ready, and until all pods and volumes are deleted
	phases   []phase       // nil for a round with emptyDirs
	driver   driverTime    // the calls of the round; nil for a round with emptyDirs
}

// perVolume returns the mean duration of all phases of a volume.
func (r round) perVolume() time.Duration {
	var sum time.Duration
	for _, p := range r.phases {
		sum += p.took
	}
	return sum
}

// runRound creates pods, waits until all are ready, deletes them with their claims, and waits until all are
// deleted with their volumes. Without a class the pods have an emptyDir.
func runRound(ctx context.Context, client kubernetes.Interface, namespace string, pods int, class, metrics string) (round, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*timeout)
	defer cancel()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if _, err := client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil {
		return round{}, err
	}
	before, err := scrape(ctx, metrics)
	if err != nil {
		return round{}, err
	}
	w, err := watch(ctx, client, namespace)
	if err != nil {
		return round{}, err
	}
	began := time.Now()
	for i := range pods {
		if err := create(ctx, client, namespace, fmt.Sprintf("p%03d", i), class); err != nil {
			return round{}, err
		}
	}
	if err := w.wait(ctx, ready, pods); err != nil {
		return round{}, err
	}
	r := round{pods: pods, up: time.Since(began)}

	began = time.Now()
	options := metav1.DeleteOptions{}
	if err := client.CoreV1().Pods(namespace).DeleteCollection(ctx, options, metav1.ListOptions{}); err != nil {
		return r, err
	}
	if err := client.CoreV1().PersistentVolumeClaims(namespace).DeleteCollection(ctx, options, metav1.ListOptions{}); err != nil {
		return r, err
	}
	gone := podGone
	if class != "" {
		gone = volumeGone
	}
	if err := w.wait(ctx, gone, pods); err != nil {
		return r, err
	}
	r.down = time.Since(began)

	after, err := scrape(ctx, metrics)
	if err != nil {
		return r, err
	}
	if class != "" {
		r.phases, r.driver = w.phases(), after.since(before)
	}
	return r, client.CoreV1().Namespaces().Delete(ctx, namespace, options)
}

// create creates a pod and, if class is not empty, its claim.
func create(ctx context.Context, client kubernetes.Interface, namespace, name, class string) error {
	source := corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
	if class != "" {
		claim := &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: corev1.PersistentVolumeClaimSpec{
				StorageClassName: &class,
				AccessModes:      []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Resources:        corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("64Mi")}},
			},
		}
		if _, err := client.CoreV1().PersistentVolumeClaims(namespace).Create(ctx, claim, metav1.CreateOptions{}); err != nil {
			return err
		}
		source = corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name}}
	}
	grace := int64(1) // with 0, the Pod would be deleted before the kubelet has stopped its containers
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			Containers:                    []corev1.Container{{Name: "pause", Image: image, VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}}},
			Volumes:                       []corev1.Volume{{Name: "data", VolumeSource: source}},
		},
	}
	_, err := client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
	return err
}
